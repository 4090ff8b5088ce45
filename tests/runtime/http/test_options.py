"""Each option reaches the scheduler as what it means, and the answer shows it as clients of the OpenAI API read it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import openai
import pytest

from fleet_testing.runtime import HTTP, Runtime

CHAT = "/v1/chat/completions"
COMP = "/v1/completions"


def post(runtime: Runtime, path: str, **body: Any) -> dict[str, Any]:
    what: dict[str, Any] = {"messages": [{"role": "user", "content": body.pop("prompt", "count:2")}]} if path == CHAT else {}
    answer = HTTP.post(runtime.data + path, json={"model": "tiny", "max_tokens": 50, **what, **body}, timeout=20)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(runtime: Runtime, path: str, **body: Any) -> list[dict[str, Any]]:
    what: dict[str, Any] = {"messages": [{"role": "user", "content": body.pop("prompt", "count:2")}]} if path == CHAT else {}
    text = HTTP.post(runtime.data + path, json={"model": "tiny", "max_tokens": 50, "stream": True, **what, **body}, timeout=20).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


MAPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 9_999_999}, {"top_k": 9_999_999}),
    (
        {"repetition_penalty": 1.1, "frequency_penalty": -2, "presence_penalty": 2},
        {"repetition_penalty": 1.1, "frequency_penalty": -2.0, "presence_penalty": 2.0},
    ),
    ({"logit_bias": {"5": -100, "259": 1}}, {"logit_bias": {"5": -100.0, "259": 1.0}}),
    ({"stop_token_ids": [7, 257]}, {"stop_ids": [257, 7]}),
    ({"stop_token_ids": [7], "ignore_eos": True}, {"stop_ids": [7]}),
    ({"min_tokens": 2}, {"min_tokens": 2}),
    ({"include_stop_str_in_output": True, "stop": "x"}, {"include_stop": True, "stop": ["x"]}),
    ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, {"keep_special": True, "spaces_between_special": False}),
    ({"cache_salt": "team-1"}, {"salt": "team-1"}),
    ({"response_format": {"type": "json_object"}}, {"grammar": ["json_schema", '{"type":"object"}', []]}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": None, "schema": {"type": "string"}}}},
        {"grammar": ["json_schema", '{"type":"string"}', []]},
    ),
    ({"response_format": {"type": "regex", "regex": "a+"}}, {"grammar": ["regex", "a+", []]}),
    ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, {"grammar": ["lark", 'start: "a"', []]}),
    ({"response_format": {"type": "choice", "choice": ["a", "b"]}}, {"grammar": ["choice", '["a", "b"]', []]}),
    ({"guided_json": '{"type": "null"}'}, {"grammar": ["json_schema", '{"type":"null"}', []]}),
    ({"guided_choice": ["é"]}, {"grammar": ["choice", '["é"]', []]}),
    ({"structured_outputs": {"regex": "a", "choice": None}}, {"grammar": ["regex", "a", []]}),
    ({"structured_outputs": {"json_object": True}}, {"grammar": ["json_schema", '{"type":"object"}', []]}),
    ({}, {"grammar": None, "logprobs": -1, "prompt_logprobs": -1, "min_tokens": 0, "priority": 0}),
]


@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize(("given", "sent"), MAPPED, ids=lambda v: next(iter(v), None))
def test_options_reach_the_scheduler(runtime: Runtime, path: str, given: dict[str, Any], sent: dict[str, Any]) -> None:
    post(runtime, path, **({} if path == CHAT else {"prompt": "count:2"}), **given)
    got = runtime.sent("Admit")[-1]
    assert {k: got[k] for k in sent} == sent


def test_priority_is_for_the_internal_port(runtime: Runtime) -> None:
    answer = HTTP.post(runtime.internal + COMP, json={"model": "tiny", "prompt": "count:1", "priority": -3})
    assert answer.status_code == 200 and runtime.sent("Admit")[-1]["priority"] == -3
    assert HTTP.post(runtime.internal + COMP, json={"model": "tiny", "prompt": "x", "priority": 1001}).status_code == 400


@pytest.mark.parametrize("path", [CHAT, COMP])
def test_n_choices_have_a_seed_each_and_count_their_prompt_once(runtime: Runtime, path: str) -> None:
    prompt = {} if path == CHAT else {"prompt": "count:2"}
    one = post(runtime, path, seed=-1, **prompt)
    three = post(runtime, path, n=3, seed=-1, **prompt)
    assert [c["index"] for c in three["choices"]] == [0, 1, 2]
    assert [c["seed"] for c in three["choices"]] == [-1, 0, 1]
    assert [a["seed"] for a in runtime.sent("Admit")[-3:]] == [2**64 - 1, 0, 1]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert three["usage"]["prompt_tokens_details"] == one["usage"]["prompt_tokens_details"]


def test_choices_of_several_prompts_come_prompt_by_prompt(runtime: Runtime) -> None:
    answer = post(runtime, COMP, prompt=["say:a", "say:b"], n=2, seed=7)
    assert [(c["index"], c["text"], c["seed"]) for c in answer["choices"]] == [(0, "a", 7), (1, "a", 8), (2, "b", 7), (3, "b", 8)]
    minted = post(runtime, COMP, prompt=["say:a", "say:a"], n=2)
    seeds = [c["seed"] for c in minted["choices"]]
    assert len(set(seeds)) == 4 and all(0 <= s < 2**53 + 4 for s in seeds)


def test_every_streamed_choice_has_its_role_seed_and_finish(runtime: Runtime) -> None:
    by_index: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in stream(runtime, CHAT, prompt="say:hey", n=3, seed=5):
        by_index[chunk["choices"][0]["index"]].append(chunk["choices"][0])
    for index, choices in by_index.items():
        assert choices[0]["delta"]["role"] == "assistant" and choices[0]["seed"] == 5 + index
        assert "".join(c["delta"].get("content", "") for c in choices) == "hey"
        assert [c["finish_reason"] for c in choices].count("stop") == 1 and choices[-1]["finish_reason"] == "stop"
    assert sorted(by_index) == [0, 1, 2]


def test_best_of_answers_the_likeliest(runtime: Runtime) -> None:
    """The scripted logprob of a token falls with its id and all choices are alike: so the order stays, and only n of them are told."""
    answer = post(runtime, COMP, prompt="say:ab", n=2, best_of=5, seed=1)
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [(0, "ab", None), (1, "ab", None)]
    assert answer["usage"]["completion_tokens"] == 10, "all that was made counts"
    assert [(a["logprobs"], a["index"]) for a in runtime.sent("Admit")[-5:]] == [(0, i) for i in range(5)]


def test_a_prompt_may_be_lists_of_token_ids(runtime: Runtime) -> None:
    answer = post(runtime, COMP, prompt=[list(b"say:one"), list(b"say:two")])
    assert [c["text"] for c in answer["choices"]] == ["one", "two"]


def test_stop_reasons_name_the_stop_of_the_request_only(runtime: Runtime) -> None:
    def reason(**options: Any) -> tuple[str, str, Any]:
        choice = post(runtime, COMP, prompt="say:hello", **options)["choices"][0]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    assert reason() == ("hello", "stop", None)
    assert reason(stop=["l"]) == ("he", "stop", "l")
    assert reason(stop=["l"], include_stop_str_in_output=True) == ("hel", "stop", "l")
    assert reason(stop_token_ids=[ord("l")]) == ("he", "stop", ord("l"))
    assert reason(stop=["l"], min_tokens=4) == ("hel", "stop", "l")
    assert stream(runtime, CHAT, prompt="say:hello", stop=["l"])[-1]["choices"][0]["stop_reason"] == "l"


def test_special_tokens_are_shown_on_request(runtime: Runtime) -> None:
    """Of an echoed prompt here; of an answer in tests/runtime/detokenizer."""
    prompt = [256, *b"count:1"]
    assert post(runtime, COMP, prompt=prompt, echo=True)["choices"][0]["text"] == "count:1a"
    assert post(runtime, COMP, prompt=prompt, echo=True, skip_special_tokens=False)["choices"][0]["text"] == "<|bos|>count:1a"


@pytest.mark.parametrize("path", [CHAT, COMP])
def test_usage_may_come_with_every_chunk(runtime: Runtime, path: str) -> None:
    prompt = {"prompt": "count:3"}
    chunks = stream(runtime, path, **prompt, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 3 and chunks[-1]["choices"] == [] and all(c["usage"]["prompt_tokens"] for c in chunks)


def test_chat_logprobs_are_one_entry_a_token_streamed_and_not(runtime: Runtime) -> None:
    plain = post(runtime, CHAT, prompt="say:aé", logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    assert [e["token"] for e in plain["content"]] == ["a", "\ufffd", "\ufffd"]
    assert bytes(b for e in plain["content"] for b in e["bytes"]) == "aé".encode()
    first = plain["content"][0]
    assert [t["token"] for t in first["top_logprobs"]] == ["a", "b"] and first["logprob"] == first["top_logprobs"][0]["logprob"]
    chunks = [c["choices"][0] for c in stream(runtime, CHAT, prompt="say:aé", logprobs=True, top_logprobs=2)]
    assert [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]] == plain["content"]
    for c in chunks:  # aligned: a chunk's tokens are those of its text
        if c["logprobs"]:
            assert bytes(b for e in c["logprobs"]["content"] for b in e["bytes"]).decode() == c["delta"]["content"]
    assert post(runtime, CHAT, prompt="say:a", logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert post(runtime, CHAT, prompt="say:a")["choices"][0]["logprobs"] is None


def test_completion_logprobs_and_their_offsets(runtime: Runtime) -> None:
    plain = post(runtime, COMP, prompt="say:aéb", logprobs=1)["choices"][0]["logprobs"]
    assert plain["tokens"] == ["a", "\ufffd", "\ufffd", "b"] and plain["text_offset"] == [0, 1, 1, 2]
    assert [next(iter(t.values())) for t in plain["top_logprobs"]] == plain["token_logprobs"]
    zero = post(runtime, COMP, prompt="say:a", logprobs=0)["choices"][0]["logprobs"]
    assert zero["token_logprobs"] == [-0.597] and zero["top_logprobs"] == [{"a": -0.597}]
    joined: dict[str, list[Any]] = defaultdict(list)
    for chunk in stream(runtime, COMP, prompt="say:aéb", logprobs=1):
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[key] += values
    assert joined == plain


def test_echo_repeats_the_prompt_with_its_logprobs(runtime: Runtime) -> None:
    given = {"prompt": "é count:2", "echo": True, "logprobs": 1}
    choice = post(runtime, COMP, **given)["choices"][0]
    assert choice["text"] == "é count:2ab"
    told = choice["logprobs"]
    assert len(told["tokens"]) == len("é count:2ab".encode()) and told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert None not in told["token_logprobs"][1:]
    for token, start in zip(told["tokens"][2:], told["text_offset"][2:], strict=True):
        assert choice["text"][start : start + len(token)] == token
    streamed = stream(runtime, COMP, **given)
    assert "".join(c["choices"][0]["text"] for c in streamed) == choice["text"]
    assert [t for c in streamed for t in c["choices"][0]["logprobs"]["tokens"]] == told["tokens"]
    nothing_new = post(runtime, COMP, **given | {"max_tokens": 0})
    assert nothing_new["choices"][0]["text"] == "é count:2" and nothing_new["usage"]["completion_tokens"] == 0
    assert nothing_new["choices"][0]["logprobs"]["tokens"] == told["tokens"][:-2] and nothing_new["choices"][0]["finish_reason"] == "length"
    assert post(runtime, COMP, prompt="count:2", echo=True)["choices"][0]["logprobs"] is None


def test_prompt_logprobs_have_ranks(runtime: Runtime) -> None:
    told = post(runtime, COMP, prompt="count:1", prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert told[0] is None and len(told) == len("count:1")
    assert told[1] == {str(ord("o")): {"logprob": -0.611, "rank": 1, "decoded_token": "o"}}
    assert post(runtime, CHAT, prompt="count:1", prompt_logprobs=0)["prompt_logprobs"][1] is not None


@pytest.mark.parametrize("path", [CHAT, COMP])
def test_token_ids_of_prompt_and_answer_come_on_request(runtime: Runtime, path: str) -> None:
    answer = post(runtime, path, prompt="say:hi", return_token_ids=True)
    prompt_ids = answer["prompt_token_ids"] if path == CHAT else answer["choices"][0]["prompt_token_ids"]
    assert bytes(i for i in prompt_ids if i < 256).endswith(b"say:hi" if path == COMP else b"assistant")
    assert bytes(answer["choices"][0]["token_ids"]) == b"hi"


def test_a_grammar_that_does_not_compile_fails_its_request_only(runtime: Runtime) -> None:
    for more in ({}, {"stream": True}):
        body = {"model": "tiny", "prompt": "compile:fail", "guided_regex": "a", **more}
        answer = HTTP.post(runtime.data + COMP, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_grammar")


def test_the_official_client_reads_logprobs_choices_and_usage(runtime: Runtime) -> None:
    client = openai.OpenAI(base_url=runtime.data + "/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "say:hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, n=2, logprobs=True, top_logprobs=1, logit_bias={"5": 1}, max_tokens=9)
    assert [c.message.content for c in chat.choices] == ["hello", "hello"]
    assert chat.choices[1].logprobs is not None and chat.choices[1].logprobs.content is not None
    assert [t.token for t in chat.choices[1].logprobs.content] == list("hello")
    assert chat.usage is not None and chat.usage.completion_tokens_details is not None
    old = client.completions.create(model="tiny", prompt=["say:hello", "say:you"], n=2, best_of=3, logprobs=2, echo=True, max_tokens=9)
    assert [c.text for c in old.choices] == ["say:hellohello"] * 2 + ["say:youyou"] * 2
    assert old.choices[0].logprobs is not None and old.choices[0].logprobs.top_logprobs is not None


def test_tokenize_and_detokenize_are_inverse(runtime: Runtime) -> None:
    told = HTTP.post(runtime.data + "/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert told == {"tokens": [97, 195, 169], "count": 3, "max_model_len": 512, "token_strs": ["a", "\ufffd", "\ufffd"]}
    assert HTTP.post(runtime.data + "/detokenize", json={"model": "tiny", "tokens": told["tokens"]}).json() == {"prompt": "aé"}
    special = {"tokens": [256, 97], "skip_special_tokens": True}
    assert HTTP.post(runtime.data + "/detokenize", json=special).json() == {"prompt": "a"}
    assert HTTP.post(runtime.data + "/detokenize", json={"tokens": [256, 97]}).json() == {"prompt": "<|bos|>a"}
