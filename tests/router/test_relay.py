"""What reaches the client and the workers for each thing a worker can do: bytes, retries, merged errors, aborts."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import httpx
import pytest

from fleet_contract.errors import ApiError
from fleet_router.api.dialects import OPENAI
from fleet_router.engines import openai_worker
from fleet_router.engines.radixfleet import Radixfleet
from fleet_testing.fake_worker import DEFAULT_STREAM, FakeWorker, Script, error_body, sse
from fleet_testing.router_fleet import MakeFleet, MakeWorker
from fleet_testing.router_process import until


def code(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    return str(error["code"])


def split(data: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.randrange(1, len(data)) for _ in range(rng.randrange(1, 40)))
    return [p for p in (data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)) if p]


@pytest.mark.case("C44")
@pytest.mark.rule("R21")
async def test_a_stream_arrives_byte_for_byte_however_it_is_split(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """Red with `data.strip()` in `Attempt._forward`: a piece that ends between two events loses its end."""
    worker = await make_worker()
    fleet = await make_fleet(worker)
    rng = random.Random(7)
    text = b": a comment\n\n" + 'data: {"t": "é😀"}\r\n\r\n'.encode() + DEFAULT_STREAM
    for _ in range(40):
        worker.scripts.append(Script(pieces=split(text, rng)))
        assert (await fleet.chat(stream=True)).content == text
    worker.scripts.append(Script(pieces=[text[i : i + 1] for i in range(len(text))]))
    assert (await fleet.chat(stream=True)).content == text
    await fleet.idle()


async def test_a_huge_event_is_passed_on_before_its_end(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    text = sse({"t": "x" * 300_000})
    worker.scripts.append(Script(pieces=[text[i : i + 10_000] for i in range(0, len(text), 10_000)]))
    assert (await fleet.chat(stream=True)).content == text


@pytest.mark.rule("R26")
async def test_both_legs_get_one_room_one_rid_and_the_token_ids(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    response = await fleet.chat("hello", stream=True, seed=3)
    assert response.content == DEFAULT_STREAM
    p, d = prefill.legs[0], decode.legs[0]
    assert (p.routed.leg, d.routed.leg) == ("prefill", "decode")
    assert p.routed.rid == d.routed.rid and p.routed.rooms == d.routed.rooms and 0 <= p.routed.rooms[0] < 2**63
    assert d.routed.bootstrap == f"127.0.0.1:{prefill.record.ports.bootstrap}"
    assert d.routed.prefill_incarnation == prefill.record.incarnation
    assert p.json == d.json == {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True, "seed": 3}
    assert p.ids == d.ids and p.ids is not None and len(p.ids) == len("<user>hello\n<assistant>")
    assert p.header("X-Request-Id") == response.headers["x-request-id"]
    await fleet.idle()


async def test_malformed_messages_go_to_the_runtime_as_they_are(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    worker.scripts.append(Script(status=400, body=error_body("invalid_type", "messages[0] is 5", "invalid_request_error")))
    response = await fleet.post("/v1/chat/completions", {"model": "tiny", "messages": [5]})
    assert (response.status_code, code(response)) == (400, "invalid_type")
    assert worker.legs[0].ids is None and worker.legs[0].header("content-type") == "application/json"


@pytest.mark.case("C41")
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
async def test_a_worker_s_refusal_arrives_unchanged_and_is_not_tried_again(status: int, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """Red with `exchange.fail(failure.error)` for every failure in `DataService._answer_failure`."""
    workers = [await make_worker(), await make_worker()]
    fleet = await make_fleet(*workers)
    body = error_body("some_code", "exactly this")
    for worker in workers:
        worker.default = Script(status=status, body=body, headers={"Retry-After": "7"})
    response = await fleet.chat()
    assert (response.status_code, response.content, response.headers["retry-after"]) == (status, body, "7")
    assert sum(len(w.legs) for w in workers) == 1
    for worker in workers:
        worker.default = Script()
    assert [(await fleet.chat()).status_code for _ in range(4)] == [200] * 4


@pytest.mark.parametrize(
    "bad",
    [
        Script(status=503, body=error_body("overloaded")),
        Script(status=502, body=b"<html>"),
        Script(close_before=True),
        Script(body=b"{}" * 20, truncate=True),
    ],
    ids=["503", "502", "closed", "half an answer"],
)
async def test_a_failed_attempt_is_tried_once_on_another_worker(bad: Script, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker(), await make_worker()]
    fleet = await make_fleet(*workers)
    for worker in workers:
        worker.default = bad
    picked: list[FakeWorker] = []
    for worker in workers:  # the first that is asked fails, the other works
        worker.scripts.append(bad)
    task = asyncio.create_task(fleet.chat())
    await until(lambda: any(w.legs for w in workers), "one worker is asked")
    for worker in workers:
        if not worker.legs:
            worker.scripts.clear()
            worker.default = Script()
        else:
            picked.append(worker)
    assert (await task).status_code == 200 or len(picked) == 2
    await fleet.idle()


@pytest.mark.rule("R24")
async def test_no_more_than_one_retry_is_made(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker() for _ in range(4)]
    fleet = await make_fleet(*workers)
    for worker in workers:
        worker.default = Script(status=503, body=error_body("overloaded", "busy", "overloaded_error"), headers={"Retry-After": "3"})
    response = await fleet.chat()
    assert (response.status_code, code(response), response.headers["retry-after"]) == (503, "overloaded", "3")
    assert sum(len(w.legs) for w in workers) == 2
    rids = {leg.routed.rid for w in workers for leg in w.legs}
    assert len(rids) == 2
    await fleet.idle()


async def test_a_single_worker_is_not_asked_twice_for_a_lost_answer(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    worker.scripts.append(Script(close_before=True, delay_s=0.6))  # longer than a connection that was dead before
    response = await fleet.chat()
    assert (response.status_code, code(response)) == (502, "worker_lost")
    assert len(worker.legs) == 1


async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_done(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    event = sse({"t": 1}, done=False)
    for pieces, seen in (([event], event), ([event, b'data: {"half'], event)):
        worker.scripts.append(Script(pieces=pieces, truncate=True))
        got, complete, request_id = await fleet.stream()
        assert not complete
        assert got.startswith(seen)
        last = json.loads(got[len(seen) :].removeprefix(b"data: "))
        assert last["error"]["code"] == "worker_lost" and last["error"]["request_id"] == request_id
        assert b"[DONE]" not in got
        await until(lambda: fleet.ready() == 1, "the worker is ready again")
    await fleet.idle()


async def test_a_stream_that_ends_politely_without_done_is_no_complete_one(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    worker.scripts.append(Script(pieces=[sse({"t": 1}, done=False)]))
    with pytest.raises(httpx.RemoteProtocolError):
        await fleet.chat(stream=True)


async def test_a_worker_s_own_error_event_is_the_last_one(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    text = sse({"t": 1}, json.loads(error_body("scheduler_died")), done=False)
    worker.scripts.append(Script(pieces=[text]))
    got, complete, _ = await fleet.stream()
    assert not complete
    assert got == text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.rule("R20")
async def test_a_client_that_leaves_ends_both_legs_at_once(stream: bool, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    never = asyncio.Event()
    prefill.default = Script(wait=never)
    decode.default = Script(wait=never)
    _, writer = await fleet.connect()
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": stream}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await until(lambda: bool(prefill.legs and decode.legs), "both legs are under way")
    assert fleet.inflight() == 2
    left = time.monotonic()
    writer.transport.abort()
    await until(lambda: bool(prefill.aborts and decode.aborts), "both workers hear the abort")
    assert time.monotonic() - left < 2.0
    rid = prefill.legs[0].routed.rid
    assert prefill.aborts == [rid] and decode.aborts == [rid]
    await until(lambda: prefill.legs[0].gone.is_set() and decode.legs[0].gone.is_set(), "both connections are closed")
    assert fleet.inflight() == 0
    assert fleet.counter("client_gone_total") == 1


@pytest.mark.rule("R20")
async def test_a_client_that_leaves_in_mid_stream_ends_the_decode_leg(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    decode.default = Script(pieces=[sse({"t": 1}, done=False)] * 3, wait_after=(1, asyncio.Event()))
    async with fleet.http.stream("POST", f"{fleet.url}/v1/chat/completions", json={"model": "tiny", "messages": [], "stream": True}) as r:
        async for _ in r.aiter_raw():
            break
    await until(lambda: decode.aborts == [decode.legs[0].routed.rid], "decode hears the abort")
    assert prefill.aborts == []  # its part was over
    await fleet.idle()


async def test_a_prefill_worker_has_nothing_in_flight_after_its_hand_over(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    go = asyncio.Event()
    decode.default = Script(wait=go)
    task = asyncio.create_task(fleet.chat(stream=True))
    by_role: dict[str, Any] = {}

    def handed_over() -> bool:
        by_role.update({w["role"]: w["inflight"] for w in fleet.told()})
        return bool(decode.legs) and by_role == {"prefill": 0, "decode": 1}

    await until(handed_over, "the prefill is idle while the decode works")
    go.set()
    assert (await task).status_code == 200


@pytest.mark.parametrize(("derived_from", "delay"), [("decode", 0.0), ("decode", 0.05), ("prefill", 0.05)])
@pytest.mark.rule("R27")
async def test_the_cause_is_reported_and_not_what_the_other_leg_made_of_it(
    derived_from: str, delay: float, make_worker: MakeWorker, make_fleet: MakeFleet
) -> None:
    legs = {"prefill": await make_worker("prefill"), "decode": await make_worker("decode")}
    fleet = await make_fleet(*legs.values())
    other = "prefill" if derived_from == "decode" else "decode"
    legs[derived_from].default = Script(status=500, body=error_body("peer_failed", "the peer failed"))
    legs[other].default = Script(status=500, body=error_body("kv_too_small", "the true cause"), delay_s=delay)
    response = await fleet.chat()
    assert (response.status_code, code(response)) == (500, "kv_too_small")
    await fleet.idle()


@pytest.mark.rule("R27")
async def test_a_derived_error_alone_is_reported_after_a_short_wait_and_ends_the_other_leg(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    prefill.default = Script(wait=asyncio.Event())
    decode.default = Script(status=500, body=error_body("peer_failed", "the peer failed"))
    response = await fleet.chat()
    assert code(response) == "peer_failed"
    await until(lambda: len(prefill.aborts) == 1, "the prefill is aborted")
    await fleet.idle()


@pytest.mark.rule("R27")
async def test_a_failed_prefill_is_replaced_and_the_pair_gets_a_new_room(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefills = [await make_worker("prefill"), await make_worker("prefill")]
    decode = await make_worker("decode")
    fleet = await make_fleet(*prefills, decode)
    decode.default = Script(wait=asyncio.Event())
    for p in prefills:
        p.default = Script(status=503, body=error_body("overloaded"))
    task = asyncio.create_task(fleet.chat(stream=True))
    await until(lambda: any(p.legs for p in prefills), "one prefill is asked")
    response = await task
    assert response.status_code == 503
    assert [len(p.legs) for p in prefills] == [1, 1]
    assert prefills[0].legs[0].routed.rooms != prefills[1].legs[0].routed.rooms
    await until(lambda: len(decode.aborts) == 2, "both decode legs are aborted")
    await fleet.idle()


@pytest.mark.rule("R27")
async def test_a_failed_transfer_is_tried_again_in_a_new_room_of_the_same_pair(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    decode.scripts.append(Script(status=502, body=error_body("transfer_failed")))
    response = await fleet.chat(stream=True)
    assert response.content == DEFAULT_STREAM
    assert decode.legs[0].routed.rooms != decode.legs[1].routed.rooms


async def test_a_stale_incarnation_is_read_again_and_the_request_served(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    old = prefill.record.incarnation
    prefill.restart()
    prefill_was_asked = asyncio.Event()  # a decode that answers first would end the other leg before it arrives
    decode.scripts.append(Script(status=409, body=error_body("stale_worker"), wait=prefill_was_asked))
    prefill.scripts.append(Script(status=409, body=error_body("stale_worker")))
    task = asyncio.create_task(fleet.chat(stream=True))
    await until(lambda: bool(prefill.legs), "the prefill has it")
    prefill_was_asked.set()
    response = await task
    assert response.content == DEFAULT_STREAM
    assert decode.legs[-1].routed.prefill_incarnation == prefill.record.incarnation != old
    await fleet.idle()


@pytest.mark.parametrize("code", ["worker_restarting", "loading", "draining"])
async def test_a_request_waits_for_its_only_worker_to_restart(code: str, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """The worker never took it: it waits as any request without a ready worker does, no longer."""
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode, queue_timeout=3.0, poll_interval=30.0)
    prefill.ready = False
    prefill.scripts.append(Script(status=503, body=error_body(code, "http was killed")))
    decode.scripts.append(Script(wait=asyncio.Event()))  # its leg waits for pages that never come
    request = asyncio.create_task(fleet.chat())
    await until(lambda: fleet.ready() == 1 and sum(fleet.brain.waiting.values()) == 1, "the request waits, and others would")
    await asyncio.wait_for(decode.legs[0].gone.wait(), 5)
    prefill.ready = True
    assert (await request).status_code == 200
    assert prefill.legs[0].routed.rooms != prefill.legs[1].routed.rooms
    prefill.ready = False
    prefill.scripts.append(Script(status=503, body=error_body(code, "http was killed")))
    answer = await fleet.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_worker")
    await fleet.idle()


async def test_what_an_attempt_took_is_not_taken_off_the_wait_for_a_worker(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """Red with a wait that ends so long after the request came: it had waited 0 s and was refused."""
    worker = await make_worker()
    fleet = await make_fleet(worker, queue_timeout=2.0, poll_interval=30.0)
    go = asyncio.Event()
    worker.ready = False
    worker.scripts.append(Script(status=503, body=error_body("draining", "it goes"), wait=go))
    request = asyncio.create_task(fleet.chat())
    await until(lambda: bool(worker.legs), "the worker has it")
    await asyncio.sleep(2.2)
    go.set()
    await until(lambda: sum(fleet.brain.waiting.values()) == 1, "the request waits")
    worker.ready = True
    assert (await request).status_code == 200
    await fleet.idle()


async def test_an_unreachable_worker_is_left_and_the_others_serve(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    dead, alive = await make_worker(), await make_worker()
    fleet = await make_fleet(dead, alive, poll_interval=5.0)
    await dead.stop()
    assert [(await fleet.chat(f"{n} is new" * 20)).status_code for n in range(10)] == [200] * 10
    assert fleet.ready() == 1


@pytest.mark.rule("R23")
async def test_a_dead_keep_alive_connection_costs_nobody_anything(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    worker.idle_close = True
    assert [(await fleet.chat(stream=True)).content for _ in range(20)] == [DEFAULT_STREAM] * 20
    assert fleet.counter("retries_total") == 0


async def test_connections_to_workers_are_kept(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, poll_interval=5.0)
    before = worker.connections
    for _ in range(20):
        await fleet.chat(stream=True)
    assert worker.connections - before <= 1


async def test_a_worker_without_a_first_token_ends_by_the_router_s_limit(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, first_token_timeout=0.2)
    worker.default = Script(wait=asyncio.Event())
    response = await fleet.chat(stream=True)
    assert (response.status_code, code(response)) == (504, "worker_timeout")
    assert "--first-token-timeout" in response.json()["error"]["message"]
    await until(lambda: len(worker.aborts) == 1, "the worker is told")
    assert worker.legs[0].routed.deadline_ms is not None and worker.legs[0].routed.deadline_ms <= 200


async def test_an_answer_in_one_piece_may_take_longer_than_a_first_token_while_its_worker_is_well(
    make_worker: MakeWorker, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of thousands of tokens has no byte before its last token."""
    monkeypatch.setattr("fleet_router.edge.relay.DEADLINE_GRACE_S", 0.1)
    monkeypatch.setattr("fleet_router.edge.relay.LOOK_AGAIN_S", 0.1)
    worker = await make_worker()
    fleet = await make_fleet(worker, first_token_timeout=0.2, answer_timeout=4.0)
    gate = asyncio.Event()
    worker.scripts.append(Script(wait=gate))
    asking = asyncio.create_task(fleet.chat())
    await asyncio.sleep(0.8)
    assert not asking.done()
    gate.set()
    assert (await asking).status_code == 200
    worker.default = Script(wait=asyncio.Event())
    late = await fleet.chat()
    assert (late.status_code, code(late)) == (504, "worker_timeout") and "--answer-timeout" in late.json()["error"]["message"]
    await until(lambda: fleet.ready() == 1, "the worker answers its polls")
    asking = asyncio.create_task(fleet.chat())
    await until(lambda: fleet.inflight() == 1, "it is with the worker")
    worker.ready = False  # it says that it is not well
    stalled = await asking
    assert stalled.status_code == 504 and "--first-token-timeout" in stalled.json()["error"]["message"]
    worker.ready = True
    await fleet.idle()


async def test_a_stream_that_falls_silent_ends_by_the_router_s_limit(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, silence_timeout=0.2)
    worker.default = Script(pieces=[sse({"t": 1}, done=False)] * 2, wait_after=(1, asyncio.Event()))
    got, complete, _ = await fleet.stream()
    assert not complete
    assert b"worker_timeout" in got
    await until(lambda: len(worker.aborts) == 1, "the worker is told")
    await fleet.idle()


@pytest.mark.rule("R16")
async def test_counts_are_zero_after_clients_and_workers_failed_in_every_way(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefills, decodes = [await make_worker("prefill") for _ in range(2)], [await make_worker("decode") for _ in range(2)]
    fleet = await make_fleet(*prefills, *decodes)
    rng = random.Random(11)
    bad = [Script(status=500, body=error_body("x")), Script(status=503, body=error_body("y")), Script(close_before=True), Script(truncate=True)]
    for worker in (*prefills, *decodes):
        worker.scripts.extend(rng.choice([*bad, Script(), Script(), Script(delay_s=0.02)]) for _ in range(60))

    async def one(n: int) -> None:
        try:
            async with asyncio.timeout(rng.choice([0.01, 0.03, 5.0])):
                await fleet.chat(f"request {n}", stream=n % 2 == 0)
        except (TimeoutError, httpx.HTTPError):
            pass

    for start in range(0, 120, 20):
        await asyncio.gather(*(one(n) for n in range(start, start + 20)))
    await fleet.idle()
    for worker in fleet.brain.workers:
        assert worker.load.picks == {}


@pytest.mark.parametrize(
    ("data", "end"),
    [(b"data: 1\n\n", 9), (b"data: 1\n\ndata", 9), (b"data: 1\r\n\r\n", 11), (b"data", 0), (b"\n", 0), (b"", 0), (b"a\n\nb\r\n\r\nc", 8)],
)
def test_the_end_of_the_last_whole_event(data: bytes, end: int) -> None:
    assert OPENAI.event_end(data) == end


@pytest.mark.parametrize(
    ("text", "n"), [(b'{"cached_tokens": 48}', 48), (b'{"cached_tokens":0,"x":1}', 0), (b"{}", None), (b'"cached_tokens": null', None)]
)
def test_cached_tokens_are_found(text: bytes, n: int | None) -> None:
    assert OPENAI.cached_tokens(text) == n


async def test_an_error_that_is_nested_without_end_is_an_answer_like_others(
    make_worker: MakeWorker, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's and SGLang's are read. The parser swallowed what was raised behind the last byte, and the request waited for its deadline."""
    monkeypatch.setattr(Radixfleet, "error", lambda self, status, body: openai_worker.error(status, body))
    worker = await make_worker()
    fleet = await make_fleet(worker, first_token_timeout=20.0, answer_timeout=20.0)
    worker.default = Script(status=500, body=b'{"error":' + b"[" * 5000 + b"]" * 5000 + b"}")
    answer = await asyncio.wait_for(fleet.chat(), 8)
    assert answer.status_code == 500
    await fleet.idle()


async def test_an_answer_whose_end_cannot_be_handled_has_an_end_all_the_same(
    make_worker: MakeWorker, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Radixfleet, status: int, body: bytes) -> ApiError:
        raise RuntimeError("as nobody foresaw")

    monkeypatch.setattr(Radixfleet, "error", broken)
    worker = await make_worker()
    fleet = await make_fleet(worker, first_token_timeout=20.0, answer_timeout=20.0)
    worker.default = Script(status=500, body=b"{}")
    answer = await asyncio.wait_for(fleet.chat(), 8)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_worker_answer")
    await fleet.idle()
