"""Control calls of the internal port: one message and its reply, in time or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_contract.errors import ApiError
from fleet_runtime import messages as m
from fleet_runtime.server.control import Controls
from fleet_testing.runtime import HTTP, Runtime, wait_for


@pytest.mark.parametrize(
    ("path", "body", "op", "args"),
    [
        ("/flush_cache", None, "flush_cache", {"wait_s": 0.0}),
        ("/flush_cache", {"wait_s": 2}, "flush_cache", {"wait_s": 2.0}),
        ("/pause", {}, "pause", {}),
        ("/continue", None, "continue", {}),
        ("/log_level", {"level": "warning"}, "log_level", {"level": "warning"}),
        ("/log_level", {"level": "info"}, "log_level", {"level": "info"}),
        ("/profile", {"steps": 5}, "profile", {"steps": 5, "timeout_s": 60.0}),
    ],
)
def test_a_call_is_answered_by_the_scheduler(runtime: Runtime, path: str, body: Any, op: str, args: dict[str, Any]) -> None:
    answer = HTTP.post(runtime.internal + path, content=b"" if body is None else json.dumps(body).encode(), timeout=20)
    assert answer.status_code == 200 and answer.json() == {"op": op, "args": args}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/log_level", {"level": "loud"}, "level"),
        ("/log_level", {}, "level"),
        ("/profile", {"steps": 0}, "steps"),
        ("/profile", {"steps": "5"}, "steps"),
        ("/flush_cache", {"wait_s": -1}, "wait_s"),
        ("/pause", {"nosuch": 1}, "nosuch"),
    ],
)
def test_wrong_arguments_are_refused(runtime: Runtime, path: str, body: dict[str, Any], param: str) -> None:
    answer = HTTP.post(runtime.internal + path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_internals_and_load_tell_of_both_processes(runtime: Runtime) -> None:
    told = HTTP.get(runtime.internal + "/internals").json()
    assert told["scheduler"]["op"] == "internals" and told["http"]["open_requests"] == 0 and "steps_total" in told["counters"]
    load = HTTP.get(runtime.internal + "/get_load").json()
    assert (load["running_requests"], load["max_rows"], load["kv_capacity_tokens"], load["draining"]) == (0, 8, 4096, False)
    assert load["incarnation"] == runtime.record()["incarnation"]


@pytest.mark.parametrize("path", ["/flush_cache", "/pause", "/continue", "/log_level", "/profile", "/internals", "/get_load"])
def test_control_calls_are_not_on_the_public_port(runtime: Runtime, path: str) -> None:
    assert HTTP.post(runtime.data + path, json={}).status_code == 404
    assert HTTP.get(runtime.data + path).status_code == 404


class Silent:
    """A channel that keeps what is sent."""

    peers = {m.SCHEDULER: "s"}

    def __init__(self, *, takes: bool = True) -> None:
        self.sent: list[Any] = []
        self._takes = takes

    def send(self, peer: str, message: m.Message) -> bool:
        self.sent.append(message)
        return self._takes


async def test_a_call_without_reply_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_runtime.server.control.CONTROL_TIMEOUT_S", 0.02)
    channel = Silent()
    controls = Controls(channel)
    with pytest.raises(ApiError, match="did not answer pause") as e:
        await controls.call("pause", {})
    assert (e.value.status, len(controls)) == (504, 0)
    assert not controls.on_reply(m.ControlReply(id=channel.sent[0].id, status=200)), "too late"


async def test_a_call_ends_with_the_scheduler_that_carried_it() -> None:
    controls = Controls(Silent())
    call = asyncio.create_task(controls.call("profile", {"steps": 9, "timeout_s": 60.0}))
    while not len(controls):
        await asyncio.sleep(0)
    controls.on_death("scheduler was killed by SIGKILL")
    with pytest.raises(ApiError, match="SIGKILL") as e:
        await call
    assert (e.value.status, len(controls)) == (503, 0)


async def test_the_schedulers_refusal_is_passed_on() -> None:
    channel = Silent()
    controls = Controls(channel)
    call = asyncio.create_task(controls.call("flush_cache", {}))
    while not channel.sent:
        await asyncio.sleep(0)
    data = json.dumps({"message": "2 run", "type": "invalid_request_error", "code": "busy"}).encode()
    assert controls.on_reply(m.ControlReply(id=channel.sent[0].id, status=409, data=data))
    with pytest.raises(ApiError, match="2 run") as e:
        await call
    assert (e.value.status, e.value.code) == (409, "busy")
    with pytest.raises(ApiError, match="not there") as gone:
        await Controls(Silent(takes=False)).call("pause", {})
    assert gone.value.status == 503


def test_log_level_sets_this_process_too(runtime: Runtime) -> None:
    assert HTTP.post(runtime.internal + "/log_level", json={"level": "debug"}).status_code == 200
    HTTP.post(runtime.data + "/v1/completions", json={"model": "tiny", "prompt": "count:1"})
    wait_for(lambda: '"request ended"' in runtime.text_of_log(), "a line of level debug is written")
    HTTP.post(runtime.internal + "/log_level", json={"level": "info"})
