"""The internal port: routed requests, token ids, legs, aborts, the worker's record and its tokenizer."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import httpx
import pytest

from fleet_contract.wire import encode_ids
from fleet_testing.runtime import HTTP, Runtime, wait_for
from fleet_text.prompt import PromptEncoder

COMP = "/v1/completions"


def rid() -> str:
    return os.urandom(16).hex()


def post(runtime: Runtime, headers: dict[str, str] | list[tuple[str, str]], *, path: str = COMP, **body: Any) -> httpx.Response:
    return HTTP.post(runtime.internal + path, json={"model": "tiny", "prompt": "count:2", **body}, headers=headers, timeout=20)


def ids_post(
    runtime: Runtime, ids: list[int], headers: dict[str, str], body: dict[str, Any] | None = None, data: bytes | None = None
) -> httpx.Response:
    text = json.dumps(body or {"model": "tiny", "prompt": "not read", "max_tokens": 50}).encode()
    all_headers = {
        "Content-Type": "application/vnd.radixfleet.ids",
        "X-Radixfleet-Json-Length": str(len(text)),
        "X-Radixfleet-Model-Revision": runtime.record()["modelRevision"],
        **headers,
    }
    return HTTP.post(runtime.internal + COMP, content=text + (encode_ids(ids) if data is None else data), headers=all_headers, timeout=20)


def test_the_worker_says_what_it_is(runtime: Runtime) -> None:
    record = HTTP.get(runtime.internal + "/worker").json()
    assert record == runtime.record(), "the announce file holds the same"
    assert record["servedNames"] == ["tiny", "ns/tiny"] and record["contextLength"] == 512
    assert (record["kvCapacityTokens"], record["maxRows"], record["pageSize"]) == (4096, 8, 16)
    assert len(record["incarnation"]) == 16 and len(record["modelRevision"]) == 16 and record["podUid"]


def test_the_tokenizer_travels_as_a_zip_with_an_etag(runtime: Runtime) -> None:
    answer = HTTP.get(runtime.internal + "/tokenizer")
    assert answer.headers["etag"] == f'"{runtime.record()["modelRevision"]}"'
    assert PromptEncoder.from_zip(answer.content).encode("hi", add_special_tokens=True) == [104, 105]
    again = HTTP.get(runtime.internal + "/tokenizer", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_routed_headers_reach_the_scheduler(runtime: Runtime) -> None:
    r, before = rid(), time.monotonic()
    headers = {"X-Radixfleet-Rid": r, "X-Radixfleet-Pick": "router-1:42", "X-Radixfleet-Deadline-Ms": "5000"}
    assert post(runtime, headers).json()["id"] == f"cmpl-{r}"
    sent = runtime.sent("Admit")[-1]
    assert (sent["rid"], sent["router_id"], sent["pick"]) == (r, "router-1", 42)
    assert before + 5 <= sent["deadline"] <= time.monotonic() + 5


def test_token_ids_replace_the_text(runtime: Runtime) -> None:
    answer = ids_post(runtime, list(b"say:from_ids"), {})
    assert answer.json()["choices"][0]["text"] == "from ids"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    assert ids_post(runtime, [5], {}, body=chat).status_code == 400, "the JSON is still checked for its endpoint"


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"X-Radixfleet-Json-Length": "99999"}, 400, "bad_wire"),
        ({"X-Radixfleet-Json-Length": "x"}, 400, "bad_wire"),
        ({"X-Radixfleet-Json-Length": "53"}, 400, "invalid_json"),
        ({"X-Radixfleet-Model-Revision": "0" * 16}, 409, "stale_worker"),
        ({"X-Radixfleet-Rid": "UPPER"}, 400, "bad_wire"),
        ({"X-Radixfleet-Pick": "nonumber"}, 400, "bad_wire"),
        ({"X-Radixfleet-Leg": "both", "X-Radixfleet-Room": "1"}, 400, "bad_wire"),
        ({"X-Radixfleet-Leg": "prefill"}, 400, "bad_wire"),
        ({"X-Radixfleet-Leg": "decode", "X-Radixfleet-Room": "1"}, 400, "bad_wire"),
        ({"X-Radixfleet-Room": str(2**63)}, 400, "bad_wire"),
    ],
)
def test_broken_routed_requests_are_refused(runtime: Runtime, headers: dict[str, str], status: int, code: str) -> None:
    answer = ids_post(runtime, [1, 2, 3, 4], headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_ids_of_odd_length_or_outside_the_vocabulary_are_refused(runtime: Runtime) -> None:
    assert ids_post(runtime, [], {}, data=b"abc").json()["error"]["code"] == "bad_wire"
    assert ids_post(runtime, [99999], {}).json()["error"]["code"] == "token_out_of_vocabulary"
    assert ids_post(runtime, [], {}).status_code == 400


def test_a_prefill_leg_is_answered_after_the_hand_over(runtime: Runtime) -> None:
    r = rid()
    headers = {"X-Radixfleet-Rid": r, "X-Radixfleet-Leg": "prefill", "X-Radixfleet-Room": "77"}
    headers["X-Radixfleet-Prefill-Incarnation"] = runtime.record()["incarnation"]
    answer = post(runtime, headers, stream=True)
    assert answer.json() == {"rid": r, "cached_tokens": 16, "prompt_tokens": len("count:2")}
    sent = runtime.sent("Admit")[-1]
    assert (sent["leg"], sent["room"]) == ("prefill", 77)


def test_a_prefill_leg_of_several_choices_has_a_room_for_each(runtime: Runtime) -> None:
    headers = [("X-Radixfleet-Leg", "prefill"), ("X-Radixfleet-Room", "5"), ("X-Radixfleet-Room", "6")]
    assert post(runtime, headers, prompt=["a", "b"]).json()["prompt_tokens"] == 2
    assert [s["room"] for s in runtime.sent("Admit")[-2:]] == [5, 6]
    assert post(runtime, headers, prompt=["a", "b", "c"]).json()["error"]["code"] == "bad_rooms"


def test_a_decode_leg_streams_and_sends_no_status_before_its_first_token(runtime: Runtime) -> None:
    r = rid()
    headers = {"X-Radixfleet-Rid": r, "X-Radixfleet-Leg": "decode", "X-Radixfleet-Room": "8", "X-Radixfleet-Bootstrap": "10.0.0.1:8998"}
    headers["X-Radixfleet-Prefill-Incarnation"] = "f" * 16
    status: list[int] = []

    def run() -> None:
        with HTTP.stream(
            "POST", runtime.internal + COMP, json={"model": "tiny", "prompt": "hang", "stream": True}, headers=headers, timeout=20
        ) as answer:
            status.append(answer.status_code)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: any(s["rid"] == r for s in runtime.sent("Admit")), "it is admitted")
    sent = runtime.sent("Admit")[-1]
    assert (sent["leg"], sent["room"], sent["bootstrap"], sent["prefill_incarnation"]) == ("decode", 8, "10.0.0.1:8998", "f" * 16)
    assert status == []
    assert HTTP.post(runtime.internal + "/abort_request", json={"rid": r}).json() == {"state": "aborted"}
    thread.join(10)
    assert status == [499], "the failure has its own status"


def test_a_leg_for_another_incarnation_is_stale_and_its_peer_is_told(runtime: Runtime) -> None:
    headers = {"X-Radixfleet-Leg": "prefill", "X-Radixfleet-Room": "4321", "X-Radixfleet-Prefill-Incarnation": "0" * 16}
    answer = post(runtime, headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stale_worker")
    rejected = wait_for(lambda: [r for r in runtime.sent("RoomRejected") if r["rooms"] == [4321]], "the scheduler is told")[0]
    assert (rejected["leg"], rejected["status"], rejected["code"]) == ("prefill", 409, "stale_worker")


def test_a_leg_refused_for_its_body_tells_its_peer_why(runtime: Runtime) -> None:
    headers = {"X-Radixfleet-Leg": "decode", "X-Radixfleet-Room": "991", "X-Radixfleet-Bootstrap": "h:1"}
    assert post(runtime, headers, temperature=9).status_code == 400
    rejected = wait_for(lambda: [r for r in runtime.sent("RoomRejected") if r["rooms"] == [991]], "the scheduler is told")
    assert len(rejected) == 1 and rejected[0]["bootstrap"] == "h:1" and "temperature" in rejected[0]["message"]


def test_an_abort_that_overtakes_its_request_wins(runtime: Runtime) -> None:
    r = rid()
    abort = lambda: HTTP.post(runtime.internal + "/abort_request", json={"rid": r}).json()["state"]  # noqa: E731
    assert abort() == "unknown"
    headers = {"X-Radixfleet-Rid": r, "X-Radixfleet-Leg": "prefill", "X-Radixfleet-Room": "55"}
    answer = post(runtime, headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "aborted")
    wait_for(lambda: [x for x in runtime.sent("RoomRejected") if x["rooms"] == [55]], "the peer is told")


def test_an_abort_needs_the_exact_rid_and_may_be_repeated(runtime: Runtime) -> None:
    r = "a" * 31 + "1"
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(runtime, {"X-Radixfleet-Rid": r}, prompt="hang")))
    thread.start()
    wait_for(lambda: any(s["rid"] == r for s in runtime.sent("Admit")), "it is admitted")

    def abort(which: str) -> str:
        return str(HTTP.post(runtime.internal + "/abort_request", json={"rid": which}).json()["state"])

    assert abort(r[:-1]) == "unknown"
    assert HTTP.post(runtime.internal + "/abort_request", json={"rid": ""}).status_code == 400
    assert HTTP.post(runtime.internal + "/abort_request", json={"rid": 5}).status_code == 400
    assert not answers
    second = post(runtime, {"X-Radixfleet-Rid": r})
    assert (second.status_code, second.json()["error"]["code"]) == (409, "duplicate_rid")
    assert abort(r) == "aborted"
    thread.join(10)
    assert answers[0].json()["error"]["code"] == "aborted"
    wait_for(lambda: abort(r) == "finished", "its end is remembered")


def test_the_deadline_ends_a_request_that_the_scheduler_forgets(runtime: Runtime) -> None:
    answer = post(runtime, {"X-Radixfleet-Deadline-Ms": "100"}, prompt="hang")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    wait_for(lambda: runtime.metrics()["radixfleet_runtime_running_requests"] == 0, "it is aborted")
