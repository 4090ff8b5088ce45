"""`make fuzz`: bodies that nobody should send, to a real worker: only 2xx and 4xx, and the same processes at the end.

    python -m fleet_testing.fuzz [--bodies N] [--seed S]

Half of the bodies are ours: good ones in which something was changed (a value, a key, a type, a byte of the JSON). The other half is made by
schemathesis from the worker's own `/openapi.json`, as good as the schema says and as bad. `storm` is the part that `make test` runs in small.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx

from fleet_testing.http_cases import is_idle, worker
from fleet_testing.runtime import Runtime, wait_for

_TEXT: Final = {"role": "user", "content": "hi"}
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
_FORCED: Final = {"type": "function", "function": {"name": "f"}}
_FORMAT: Final = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
_CALLED: Final[list[dict[str, Any]]] = [
    _TEXT,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}]},
]
_LOCAL: Final = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "b"}}}]}
_MESSAGES: Final = "/v1/messages"
_CHAT: Final = "/v1/chat/completions"
_COMP: Final = "/v1/completions"
SEEDS: Final[list[tuple[str, dict[str, Any]]]] = [
    (_CHAT, {"messages": [_TEXT]}),
    (_CHAT, {"messages": [_TEXT], "stream": True, "stream_options": {"include_usage": True}, "n": 2}),
    (_CHAT, {"messages": [_TEXT], "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
    (_CHAT, {"messages": [_TEXT], "tools": [_TOOL], "tool_choice": _FORCED}),
    (_CHAT, {"messages": [_TEXT], "response_format": _FORMAT}),
    (_CHAT, {"messages": [_TEXT, {"role": "assistant", "content": "a"}], "continue_final_message": True}),
    (_CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "logprobs": True, "top_logprobs": 2}),
    (_COMP, {"prompt": "hi", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 1}),
    (_COMP, {"prompt": ["hi", "you"], "n": 2, "best_of": 3, "echo": True, "logprobs": 1}),
    (_COMP, {"prompt": [1, 2, 3], "stop": ["a", "b"], "stop_token_ids": [5], "min_tokens": 2, "logit_bias": {"5": 1}}),
    (_COMP, {"prompt": [[1], [2]], "guided_regex": "[ab]+", "presence_penalty": 1, "frequency_penalty": 1}),
    (_COMP, {"prompt": "hi", "structured_outputs": {"choice": ["a", "b"]}, "repetition_penalty": 1.1, "prompt_logprobs": 1}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "pooling": "mean"}),
    ("/tokenize", {"messages": [_TEXT], "tools": [_TOOL], "add_generation_prompt": False}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 256], "skip_special_tokens": True}),
    (_MESSAGES, {"max_tokens": 4, "messages": [_TEXT], "system": [{"type": "text", "text": "s"}], "stop_sequences": ["a"], "stream": True}),
    (
        _MESSAGES,
        {"max_tokens": 4, "messages": _CALLED, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}},
    ),
    (_MESSAGES, {"max_tokens": 4, "messages": [_TEXT], "thinking": {"type": "adaptive"}, "top_k": 3, "temperature": 0.5}),
    (_MESSAGES + "/count_tokens", {"messages": [_TEXT], "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    ("/api/chat", {"messages": [_TEXT], "options": {"num_predict": 4, "stop": ["a"], "repeat_penalty": 1.1}, "format": {"type": "object"}}),
    ("/api/chat", {"messages": [_TEXT, _LOCAL, {"role": "tool", "content": "x", "tool_name": "f"}], "tools": [_TOOL], "options": {"num_predict": 4}}),
    ("/api/generate", {"prompt": "hi", "system": "s", "options": {"num_predict": 4}, "logprobs": True, "stream": False}),
    ("/api/generate", {"prompt": "hi", "raw": True, "options": {"num_predict": 4, "seed": 1}, "think": None}),
    ("/api/embed", {"input": ["a", "b"], "truncate": False}),
    ("/api/show", {"model": "tiny", "verbose": True}),
]
_NASTY: Final[list[Any]] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 2**31, 2**32, 2**63, 2**64, 10**30, "", "a", "\x00", "\ud7ff", "😀" * 50, "x" * 5000,
    [], {}, [[]], [None], [{}], {"a": None}, {"": ""}, [0] * 300, ["a"] * 300, {"type": "object"}, {"$ref": "#"}, "auto", "required", "none",
    {"role": "assistant"}, {"role": "tool", "content": "x"}, {"type": "image_url", "image_url": {"url": "http://x"}}, [1, "a"], "(", "[a-z]{1,9999}",
]  # fmt: skip
_NAMES: Final = (
    "model messages prompt input tools tool_choice stream stream_options n best_of max_tokens max_completion_tokens min_tokens temperature top_p"
    " top_k min_p stop stop_token_ids logit_bias logprobs top_logprobs prompt_logprobs echo suffix seed user response_format structured_outputs"
    " guided_json guided_regex guided_grammar guided_choice presence_penalty frequency_penalty repetition_penalty ignore_eos cache_salt priority"
    " system stop_sequences thinking metadata options format think raw template images keep_alive"
    " skip_special_tokens include_stop_str_in_output continue_final_message add_generation_prompt chat_template_kwargs bootstrap_room rid nosuch"
).split()


def mutant(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body."""
    path, seed = rng.choice(SEEDS)
    body: Any = json.loads(json.dumps({"model": "tiny", **({"max_tokens": 4} if path in (_CHAT, _COMP) else {}), **seed}))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        _change(body, rng)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.25:
        data = _damage(data, rng)
    return path, data


def _change(body: Any, rng: random.Random) -> None:
    """One value, key or name somewhere in the body."""
    found = places(body)
    if not found:  # all was taken out
        body[rng.choice(_NAMES)] = copy.deepcopy(rng.choice(_NASTY))
        return
    where, key = rng.choice(found)
    kind = rng.random()
    if kind < 0.5:
        where[key] = copy.deepcopy(rng.choice(_NASTY))
    elif kind < 0.65:
        del where[key]
    elif kind < 0.75:
        where[key] = [where[key]] if rng.random() < 0.5 else {"a": where[key]}
    elif kind < 0.9:
        body[rng.choice(_NAMES)] = copy.deepcopy(rng.choice(_NASTY))
    else:
        deep: Any = copy.deepcopy(rng.choice(_NASTY))
        for _ in range(rng.choice((3, 30, 300))):
            deep = [deep] if rng.random() < 0.5 else {"properties": deep}
        where[key] = deep


def places(value: Any) -> list[tuple[Any, Any]]:
    """Container and key of each value in it."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    out = [(value, key) for key, _ in items]
    for _, item in items:
        out += places(item)
    return out


def _damage(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    some = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 4)))
    added, replaced = data[:at] + some + data[at:], data[:at] + some + data[at + len(some) :]
    return rng.choice((data[:at], added, replaced, data + data, b"[" * 2000 + data, data.replace(b'"', b"", 1)))


def storm(runtime: Runtime, bodies: int, seed: int) -> Counter[int]:
    """Sends that many mutants; the answers by status. Raises AssertionError for one that is no 2xx and no 4xx, or has no error in it."""

    def some(part: int) -> Counter[int]:
        rng, statuses = random.Random(f"{seed}/{part}"), Counter[int]()
        with httpx.Client(base_url=runtime.data, verify=False, timeout=60) as client:
            for _ in range(bodies // 4):
                path, data = mutant(rng)
                answer = client.post(path, content=data)
                statuses[answer.status_code] += 1
                good = 200 <= answer.status_code < 300 and b'"error"' not in answer.content[-300:]
                refused = 400 <= answer.status_code < 500 and bool(_message(answer.json()["error"])) and len(answer.content) < 4096
                assert good or refused, f"{path} {data[:2000]!r} -> {answer.status_code} {answer.text[:500]}"
        return statuses

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(some, range(4)), Counter[int]())


def _message(error: Any) -> Any:
    """Of an error's inner part: Ollama's is the message itself."""
    return error if isinstance(error, str) else error["message"]


def schemathesis(runtime: Runtime, folder: str, bodies: int, seed: int) -> int:
    """Runs schemathesis against the document that the worker publishes; its exit code. Args: folder: where it leaves its cache."""
    examples = max(1, bodies // len(SEEDS))
    program = str(Path(sys.executable).with_name("schemathesis"))
    checks = "not_a_server_error,negative_data_rejection,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [program, "run", f"{runtime.data}/openapi.json", "--checks", checks, "--include-method", "POST", "--continue-on-failure"]
    command += ["--max-examples", str(examples), "--seed", str(seed), "--phases", "fuzzing", "--workers", "2", "--mode", "all", "--no-color"]
    return subprocess.run([*command, "--suppress-health-check", "all", "--request-timeout", "60"], cwd=folder, check=False).returncode


def main() -> int:
    """See the module. Exits non-zero when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--scripted", action="store_true", help="with the scripted scheduler: http alone")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, worker(Path(folder) / "worker", fake=options.scripted) as runtime:
        runtime.wait_ready()
        before = runtime.children()
        statuses = storm(runtime, options.bodies, options.seed)
        print("our own bodies, by status:", dict(sorted(statuses.items())), flush=True)
        failed = schemathesis(runtime, folder, options.bodies, options.seed)
        wait_for(lambda: is_idle(runtime), "nothing is in flight")
        same = all(child.is_running() for child in before)
        print("the same processes live" if same else "A PROCESS WAS RESTARTED")
    return int(bool(failed) or not same)


if __name__ == "__main__":
    sys.exit(main())
