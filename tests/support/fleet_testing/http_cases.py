"""What the cases of part runtime-http share: chat and completion bodies as raw bytes, streams read event by event, and ALIVE."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from fleet_testing.runtime import HTTP, Runtime, wait_for

CTX = 512
CHAT = "/v1/chat/completions"
COMP = "/v1/completions"
FLAGS = (
    "--served-model-name=tiny",
    f"--context-length={CTX}",
    "--kv-cache-memory=131072",  # a pool of 2,048 tokens of the simulated executor
    "--simulated-step-base-ms=0.2",
    "--simulated-step-per-row-ms=0.01",
    "--debug-checks=true",
    "--max-body-bytes=4000000",
)
_PREFIX = "radixfleet_runtime_"


def worker(folder: Path, *flags: str, fake: bool = False) -> Runtime:
    """A worker of the cases: the real scheduler over the simulated executor, or the scripted one (with room for tools in the prompt)."""
    given = {f.split("=")[0] for f in flags if "name" not in f} | ({"--context-length"} if fake else set())
    common = [f for f in FLAGS if f.split("=")[0] not in given] + (["--context-length=4096"] if fake else [])
    return Runtime(folder, *common, *flags, fake=fake)


def raw(options: str, path: str = CHAT) -> bytes:
    """CHAT or COMP with literal JSON in it, as no client library would send it."""
    prompt = '"messages":[{"role":"user","content":"hi"}]' if path == CHAT else '"prompt":"hi"'
    return ('{"model":"tiny",' + prompt + ',"max_tokens":8' + ("," if options else "") + options + "}").encode()


def body(path: str = CHAT, **options: Any) -> bytes:
    """CHAT{...} or COMP{...}."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return json.dumps({"model": "tiny", "max_tokens": 8, **prompt, **options}).encode()


def post(runtime: Runtime, path: str, data: bytes, **headers: str) -> httpx.Response:
    """Raw bytes to the public port."""
    return HTTP.post(runtime.data + path, content=data, headers={"content-type": "application/json", **headers}, timeout=60)


def refused(answer: httpx.Response, *words: str, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The error of an answer that refuses: JSON in the one shape, short, with these words."""
    assert answer.status_code == status, (answer.status_code, answer.text[:500])
    assert answer.headers["content-type"] == "application/json" and len(answer.content) < 4096
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"} and error["message"]
    assert error["param"] is None or isinstance(error["param"], str)
    assert not [w for w in words if w not in error["message"]], error["message"]
    assert param is None or error["param"] == param, error
    return dict(error)


def chunks(runtime: Runtime, path: str, data: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well: `[DONE]` stands once, last."""
    answer = post(runtime, path, data)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text[:500]
    answer.content.decode()  # valid UTF-8
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


def text_of(streamed: list[dict[str, Any]], index: int = 0) -> str:
    """The joined text of one choice."""
    choices = [c for chunk in streamed for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


@contextlib.contextmanager
def alive(runtime: Runtime) -> Iterator[None]:
    """ALIVE: afterwards the same processes answer, nothing is in flight, no page is held but the prefix cache's, and none after a flush."""
    before = runtime.children()
    yield
    answer = HTTP.post(runtime.data + CHAT, content=body())
    assert answer.status_code == 200, answer.text
    assert all(child.is_running() for child in before), "a process was restarted"
    wait_for(lambda: is_idle(runtime), "nothing is in flight")
    assert HTTP.post(runtime.internal + "/flush_cache", json={"wait_s": 5}).status_code == 200
    wait_for(lambda: runtime.metrics()[_PREFIX + "pages_tree"] == 0, "the flushed cache holds nothing")


def is_idle(runtime: Runtime) -> bool:
    """No request anywhere, no page but the prefix cache's."""
    metrics = runtime.metrics()
    return not any(metrics[_PREFIX + name] for name in ("running_requests", "waiting_requests", "http_open_requests", "pages_request"))
