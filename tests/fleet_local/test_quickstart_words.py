"""What `make up` tells while it waits and when it fails, and when it leaves the chart alone."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet_local.errors import ClusterError
from fleet_local.install import IMAGES, chart_hash, local_values, pod_lines, registry_values
from fleet_local.quickstart import ask, events, why_not_available


def service(*conditions: dict[str, Any], generation: int = 2) -> dict[str, Any]:
    return {"metadata": {"name": "chat", "namespace": "default", "generation": generation}, "status": {"conditions": list(conditions)}}


@pytest.mark.parametrize(
    ("resource", "words"),
    [
        ({"metadata": {"generation": 1}}, "has not looked at it yet"),
        (service(), "has not looked at it yet"),
        (service({"type": "Available", "status": "True", "observedGeneration": 1}), "newest change"),
        (service({"type": "Available", "status": "True", "observedGeneration": 2}), None),
        (service({"type": "Available", "status": "False", "observedGeneration": 2, "reason": "Starting", "message": "0 of 1"}), "Starting: 0 of 1"),
    ],
    ids=["no status", "no conditions", "old generation", "available", "not yet"],
)
def test_the_reason_for_waiting_is_the_conditions_own(resource: dict[str, Any], words: str | None) -> None:
    reason = why_not_available(resource)
    assert reason is None if words is None else reason is not None and words in reason


def test_a_pod_that_cannot_start_says_why() -> None:
    ended = {"exitCode": 1, "reason": "Error", "message": "ModelNotFound"}
    pod = {
        "metadata": {"name": "chat-1-p-0"},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient cpu"}],
            "containerStatuses": [
                {"name": "a", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}, "lastState": {"terminated": ended}},
                {"name": "b", "state": {"running": {}}, "ready": False, "restartCount": 3},
            ],
        },
    }
    text = "\n".join(pod_lines(pod))
    for words in (
        "chat-1-p-0: Running",
        "Insufficient cpu",
        "CrashLoopBackOff back-off",
        "code 1 (Error): ModelNotFound",
        "b runs but is not ready; restarts: 3",
    ):
        assert words in text


def test_a_release_is_another_when_a_file_a_name_or_a_value_changes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    seen = [chart_hash(tmp_path, {}), chart_hash(tmp_path, {"x": "1"})]
    (tmp_path / "a").write_text("2")
    seen.append(chart_hash(tmp_path, {}))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.append(chart_hash(tmp_path, {}))
    assert len(set(seen)) == 4 and chart_hash(tmp_path, {}) == seen[-1]


def test_every_image_has_a_value_in_both_ways() -> None:
    assert {f"images.{i}" for i in IMAGES} <= set(local_values())
    assert registry_values("reg.example/a/", "1.2") == {f"images.{i}": f"reg.example/a/radixfleet-{i}:1.2" for i in IMAGES}


@contextmanager
def endpoint(status: int, body: bytes) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()


def stream(*documents: object, done: bool = True) -> bytes:
    return b"".join(f"data: {json.dumps(d)}\n\n".encode() for d in documents) + (b"data: [DONE]\n\n" if done else b"")


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def test_a_chat_is_written_as_it_comes() -> None:
    said: list[str] = []
    with endpoint(200, stream({"choices": [{"delta": {"role": "assistant"}}]}, delta("Hel"), delta("lo"), {"choices": []})) as (url, asked):
        assert ask(url, "default/chat", "hi", said.append) == 2
    assert said == ["Hel", "lo"]
    assert asked[0]["model"] == "default/chat" and asked[0]["stream"] is True


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, b'{"error": {"message": "no worker"}}', "answered with 503: .*no worker"),
        (200, stream(delta("a"), done=False), "ended without .DONE."),
        (200, stream(delta("a"), {"error": {"message": "decode died"}}, done=False), "with an error: decode died"),
        (200, stream(), "brought no text"),
    ],
    ids=["refused", "cut off", "error event", "empty"],
)
def test_a_chat_that_fails_says_how(status: int, body: bytes, words: str) -> None:
    with endpoint(status, body) as (url, _), pytest.raises(ClusterError, match=words):
        ask(url, "m", "hi", lambda _: None)


def test_lines_that_are_not_data_are_passed_over() -> None:
    assert list(events(iter([b": ping\n", b"event: x\n", b'data: {"a": 1}\n', b"data: [DONE]\n", b"data: {"]))) == [{"a": 1}]
