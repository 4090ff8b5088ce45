"""The hand-over between two schedulers in this process: tokens, refusals, aborts in every state, faults, random rooms."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from fleet_contract import handoff
from fleet_runtime import messages as m
from fleet_runtime.engine.simulated import PAGE_BYTES
from fleet_runtime.scheduler.request import State
from fleet_testing.hand_over_harness import QUICK, TICK_S, Pair, RealClockScheduler, Workers
from fleet_testing.runtime import wait_for
from fleet_testing.scheduler_harness import Answer, VirtualScheduler, flags_of, rid_of

Make = Callable[..., RealClockScheduler]


@pytest.fixture
def make() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture
def pair(make: Make) -> Pair:
    return Pair(make("prefill"), make("decode"))


def prompt(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100, 700])
def test_a_pair_gives_the_tokens_of_a_unified_worker(pair: Pair, length: int) -> None:
    ids = prompt(length)
    first, second = pair.ask(rid_of(1), ids, 20)
    pair.turn_to_end(first, second)
    assert first.end == m.HandedOver(rid=rid_of(1), index=0, cached_tokens=0, prompt_tokens=length)
    assert second.end == "length" and second.ids == VirtualScheduler(flags_of(256)).answer(ids, 20)
    pair.turn_to_idle()
    assert pair.decode.scheduler.counters()["prefilled_tokens_total"] == 0
    assert pair.prefill.scheduler.counters()["decode_tokens_total"] == 0
    assert pair.decode.scheduler.counters()["received_tokens_total"] == length
    pages = -(-length // 16)
    for worker in (pair.prefill, pair.decode):
        counters = worker.scheduler.counters()
        assert counters["transfer_rooms_total"] == 1 and counters["transfer_checksum_failures_total"] == 0
        assert (counters["transfer_pages_total"], counters["transfer_bytes_total"]) == (pages, pages * PAGE_BYTES)


def test_sampling_goes_on_with_prefills_seed(pair: Pair) -> None:
    ids = prompt(50)
    pair.prefill.admit(rid_of(1), ids, 16, leg="prefill", room=9, temperature=1.0, seed=2**64 - 5)
    pair.decode.admit(rid_of(1), ids, 16, leg="decode", room=9, temperature=1.0, seed=3, bootstrap=pair.prefill.bootstrap, prefill_incarnation="")
    answer = pair.decode.inbox.of(rid_of(1))
    pair.turn_to_end(answer)
    assert answer.ids == VirtualScheduler().answer(ids, 16, temperature=1.0, seed=2**64 - 5)


def test_one_token_and_a_first_token_that_stops_end_at_once(pair: Pair) -> None:
    ids = prompt(40)
    first_token = VirtualScheduler().answer(ids, 1)
    _, short = pair.ask(rid_of(1), ids, 1)
    _, stopped = pair.ask(rid_of(2), ids, 9, stop_ids=first_token)
    pair.turn_to_end(short, stopped)
    assert (short.end, short.ids) == ("length", first_token)
    assert (stopped.end, stopped.ids, stopped.completion_tokens) == ("stop", [], 1)
    pair.turn_to_idle()


def test_the_next_turn_moves_only_pages_that_decode_lacks_and_reports_prefills_hits(pair: Pair) -> None:
    ids = prompt(160)
    _, answer = pair.ask(rid_of(1), ids, 32)
    pair.turn_to_end(answer)
    moved = pair.decode.scheduler.counters()["transfer_pages_total"]
    assert moved == 10
    again = ids + answer.ids + prompt(20, seed=2)
    _, second = pair.ask(rid_of(2), again, 4)
    pair.turn_to_end(second)
    assert second.ids == VirtualScheduler().answer(again, 4)
    # Decode holds prompt and answer (191 computed tokens, 11 whole pages); prefill only the prompt's 10 pages.
    assert pair.decode.scheduler.counters()["transfer_pages_total"] - moved == -(-len(again) // 16) - 11
    assert second.cached_tokens == 160
    pair.turn_to_idle()


def test_rooms_of_one_batch_are_handed_over_one_by_one(pair: Pair) -> None:
    answers = []
    for index in range(3):
        fields = {"index": index, "room": 50 + index}
        pair.prefill.scheduler.handle(m.Admit(**{"rid": rid_of(1), "ids": b"\5\0\0\0" * (20 + index), "max_new": 5, "leg": "prefill", **fields}))  # type: ignore[arg-type]
        pair.decode.scheduler.handle(
            m.Admit(
                **{"rid": rid_of(1), "ids": b"\5\0\0\0" * (20 + index), "max_new": 5, "leg": "decode", "bootstrap": pair.prefill.bootstrap, **fields}
            )  # type: ignore[arg-type]
        )
        answers.append(pair.decode.inbox.of(rid_of(1), index))
    pair.turn_to_end(*answers)
    assert all(a.end == "length" and len(a.ids) == 5 for a in answers)
    pair.turn_to_idle()


def test_a_corrupt_page_fails_both_legs_and_is_counted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = pair.prefill.executor.read_page, []

    def corrupt(page: int) -> bytes:
        reads.append(page)
        return read(page)

    monkeypatch.setattr(pair.prefill.executor, "read_page", corrupt)
    real = handoff.encode

    def flip(message: handoff.Handoff, payload_bytes: int = 0) -> bytes:
        if isinstance(message, handoff.Pages):
            message.crc[0] ^= 1
        return real(message, payload_bytes)

    monkeypatch.setattr(handoff, "encode", flip)
    first, second = pair.ask(rid_of(1), prompt(40))
    pair.turn_to_end(first, second)
    assert second.failed.code == "transfer_corrupt" and "checksum" in second.failed.message
    assert first.failed.code == "peer_failed" and "checksum" in first.failed.message
    assert pair.decode.scheduler.counters()["transfer_checksum_failures_total"] == 1
    pair.turn_to_idle()
    monkeypatch.undo()
    _, good = pair.ask(rid_of(2), prompt(40))
    pair.turn_to_end(good)
    assert good.end == "length"


def test_layouts_that_differ_fail_with_both_values(make: Make) -> None:
    prefill = make("prefill", model_revision="aaaa", **QUICK)
    pair = Pair(prefill, make("decode", model_revision="bbbb", **QUICK))
    first, second = pair.ask(rid_of(1), prompt(20))
    pair.turn_to_end(second)
    assert second.failed.status == 503 and second.failed.code == "incompatible_peer"
    assert "model_revision is 'bbbb' here and 'aaaa' there" in second.failed.message
    pair.turn_to_end(first)
    assert first.failed.code == "peer_failed"
    pair.turn_to_idle()


def test_a_stale_incarnation_is_a_409_that_the_router_knows(pair: Pair) -> None:
    _, answer = pair.ask(rid_of(1), prompt(20), legs="d", prefill_incarnation="f" * 16)
    pair.turn_to_end(answer)
    assert (answer.failed.status, answer.failed.code) == (409, "stale_worker")
    pair.turn_to_idle()


def test_an_address_nobody_listens_on_fails_at_once(pair: Pair) -> None:
    _, answer = pair.ask(rid_of(1), prompt(20), legs="d", bootstrap="127.0.0.1:1")
    _, bad = pair.ask(rid_of(2), prompt(20), legs="d", bootstrap="nonsense")
    pair.turn_to_end(answer, bad)
    assert answer.failed.status == 503 and "cannot be reached" in answer.failed.message
    assert "host:port" in bad.failed.message
    pair.turn_to_idle()


@pytest.mark.parametrize("legs", ["p", "d"])
def test_a_leg_whose_partner_never_comes_ends(make: Make, legs: str) -> None:
    pair = Pair(make("prefill", **QUICK), make("decode", **QUICK))
    answers = pair.ask(rid_of(1), prompt(20), legs=legs)
    answer = answers[0] if legs == "p" else answers[1]
    pair.turn_to_end(answer)
    assert answer.failed.code == "peer_failed"
    assert "did not come" in answer.failed.message
    pair.turn_to_idle()


@pytest.mark.parametrize("rejected_first", [True, False])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_refused_leg_ends_the_other_with_the_cause(pair: Pair, leg: str, rejected_first: bool) -> None:
    refused, other = (pair.prefill, pair.decode) if leg == "prefill" else (pair.decode, pair.prefill)
    note = m.RoomRejected(
        rooms=[7],
        leg=leg,
        bootstrap=pair.prefill.bootstrap,
        prefill_incarnation="",
        status=400,
        type="invalid_request_error",
        code="x",
        message="too long",
    )
    if rejected_first:
        refused.scheduler.handle(note)
        pair.turn(lambda: len(pair.prefill.transfer._prefill.tombstones) == 1, "the room is tombstoned")
    pair.ask(rid_of(1), prompt(20), legs="d" if leg == "prefill" else "p", room=7)
    if not rejected_first:
        refused.scheduler.handle(note)
    answer = other.inbox.of(rid_of(1))
    pair.turn_to_end(answer)
    assert (answer.failed.status, answer.failed.code) == (400, "peer_failed")
    assert "too long" in answer.failed.message
    pair.turn_to_idle()


def test_a_leg_that_its_scheduler_refuses_ends_the_other(make: Make) -> None:
    pair = Pair(make("prefill"), make("decode", pages=16))
    first, second = pair.ask(rid_of(1), prompt(200), 100)
    pair.turn_to_end(first, second)
    assert (second.failed.status, second.failed.code) == (400, "kv_capacity_exceeded")
    assert "304 tokens" in second.failed.message and "256 tokens" in second.failed.message
    assert first.failed.code == "peer_failed"
    pair.turn_to_idle()


def test_a_room_number_used_twice_is_refused_and_harms_nobody(make: Make) -> None:
    pair = Pair(make("prefill", **QUICK), make("decode", **QUICK))
    first, second = pair.ask(rid_of(1), prompt(20), room=5)
    third, fourth = pair.ask(rid_of(2), prompt(30), room=5)
    pair.turn_to_end(first, second, third, fourth)
    assert isinstance(first.end, m.HandedOver) and second.end == "length"
    assert third.failed.code == "room_in_use" and fourth.failed.status in (409, 503)
    fifth, sixth = pair.ask(rid_of(3), prompt(30), room=5)
    pair.turn_to_end(fifth, sixth)
    assert fifth.failed.code == "room_in_use"
    pair.turn_to_idle()


def test_legs_with_different_prompts_are_refused(pair: Pair) -> None:
    pair.prefill.admit(rid_of(1), prompt(40), leg="prefill", room=3)
    pair.decode.admit(rid_of(1), prompt(80), leg="decode", room=3, bootstrap=pair.prefill.bootstrap)
    pair.turn_to_end(pair.prefill.inbox.of(rid_of(1)), pair.decode.inbox.of(rid_of(1)))
    assert "different prompts" in pair.prefill.inbox.of(rid_of(1)).failed.message
    pair.turn_to_idle()


# Aborts: one for each state of the table in contract.md 9.7.

PREFILL_STATES = [State.BOOTSTRAPPING, State.WAITING, State.PREFILLING, State.TRANSFERRING]
DECODE_STATES = [State.CONNECTING, State.PREALLOC, State.RECEIVING, State.DECODING]


def _hold_in(pair: Pair, side: RealClockScheduler, state: State) -> None:
    """Turns the loops until request 1 is in a state on one side, and no further."""
    rid = rid_of(1)
    match state:
        case State.BOOTSTRAPPING:
            pair.ask(rid, prompt(100), 50, legs="p", room=77)
        case State.CONNECTING:
            pair.ask(rid, prompt(100), 50, room=77)
        case State.PREALLOC:
            # Its only row is taken by a request that runs for long.
            pair.decode.admit(rid_of(9), prompt(5), 1500)
            pair.decode.scheduler.iterate()
            pair.ask(rid, prompt(100), 50, room=77)
        case State.WAITING:
            pair.prefill.admit(rid_of(9), prompt(5), 1500)
            pair.prefill.scheduler.iterate()
            pair.ask(rid, prompt(100), 50, room=77)
        case _:
            pair.ask(rid, prompt(100), 50, room=77)
    pair.turn(lambda: side.state(rid) is state, f"it is {state.value}")


@pytest.mark.parametrize(("side_name", "state"), [("prefill", s) for s in PREFILL_STATES] + [("decode", s) for s in DECODE_STATES])
def test_an_abort_in_every_state_ends_both_legs_and_frees_everything(make: Make, side_name: str, state: State) -> None:
    flags: dict[str, object] = {"max_rows": 1, "max_step_tokens": 32}
    pair = Pair(make("prefill", flags=flags), make("decode", flags=flags))
    side = pair.prefill if side_name == "prefill" else pair.decode
    _hold_in(pair, side, state)
    side.scheduler.handle(m.Abort(rid=rid_of(1), reason="client gone"))
    mine = side.inbox.of(rid_of(1))
    assert mine.failed.code == "aborted" and mine.failed.message == "client gone"
    if side.book.requests.get((rid_of(9), 0)):
        side.scheduler.handle(m.Abort(rid=rid_of(9)))
    other = pair.decode if side is pair.prefill else pair.prefill
    their = other.inbox.of(rid_of(1))
    if (rid_of(1), 0) in other.book.requests:
        pair.turn_to_end(their)
        if state in (State.TRANSFERRING, State.RECEIVING, State.DECODING) and not isinstance(their.end, m.Failed):
            # Everything was under way already: the other leg had all it needed before it heard of the abort.
            assert their.end == "length" or isinstance(their.end, m.HandedOver)
        else:
            assert their.failed.code == "aborted"
    pair.turn_to_idle()
    if state is State.BOOTSTRAPPING:  # the late decode leg meets the tombstone
        pair.ask(rid_of(1), prompt(100), 50, legs="d", room=77)
        pair.turn_to_end(their)
        assert their.failed.code == "aborted"
        pair.turn_to_idle()
    _, after = pair.ask(rid_of(2), prompt(60), 4)
    pair.turn_to_end(after)
    assert after.ids == VirtualScheduler().answer(prompt(60), 4)


def test_an_abort_that_overtakes_its_request_wins_on_both_sides(pair: Pair) -> None:
    pair.decode.scheduler.handle(m.Abort(rid=rid_of(1)))
    first, second = pair.ask(rid_of(1), prompt(40))
    pair.turn_to_end(first, second)
    assert first.failed.code in ("aborted", "peer_failed") and second.failed.code == "aborted"
    pair.turn_to_idle()


# Faults of the peer.


def test_a_blocked_transfer_fails_by_its_timer_and_is_never_recomputed(make: Make) -> None:
    prefill = make("prefill", flags={"transfer_hold": True}, transfer_timeout_s=0.5)
    pair = Pair(prefill, make("decode"))
    first, second = pair.ask(rid_of(1), prompt(100))
    pair.turn_to_end(first, second)
    assert (first.failed.status, first.failed.code) == (504, "transfer_timeout")
    assert (second.failed.status, second.failed.code) == (504, "peer_failed")
    assert pair.decode.scheduler.counters()["prefilled_tokens_total"] == 0
    pair.turn_to_idle()


def test_a_blocked_transfer_fails_by_the_requests_deadline_if_that_is_sooner(make: Make) -> None:
    pair = Pair(make("prefill", flags={"transfer_hold": True}), make("decode"))
    deadline = time.monotonic() + 0.4
    first, second = pair.ask(rid_of(1), prompt(100), deadline=deadline)
    pair.turn_to_end(first, second)
    assert {first.failed.status, second.failed.status} == {504}
    assert "deadline_exceeded" in (first.failed.code, second.failed.code)
    pair.turn_to_idle()


def test_a_queue_is_bounded_only_by_the_deadline_not_by_the_silence_timers(make: Make) -> None:
    pair = Pair(make("prefill", **QUICK), make("decode", flags={"max_rows": 1}, **QUICK))
    blocker = pair.decode.admit(rid_of(9), prompt(5), 1500)
    pair.decode.scheduler.iterate()
    first, second = pair.ask(rid_of(1), prompt(40))
    until = time.monotonic() + 12 * TICK_S
    # Only prefill turns: decode's queue does not move, but its I/O thread says that it lives.
    pair.turn(lambda: time.monotonic() > until, "time has passed", decode=False)
    assert first.end is None and second.end is None and blocker.end is None
    pair.decode.scheduler.handle(m.Abort(rid=rid_of(9)))
    pair.turn_to_end(first, second)
    assert second.end == "length"


def test_a_restarted_prefill_worker_serves_the_next_room_and_the_old_rooms_fail(make: Make) -> None:
    old = make("prefill", flags={"transfer_hold": True})
    decode = make("decode")
    pair = Pair(old, decode)
    _, lost = pair.ask(rid_of(1), prompt(40))
    pair.turn(lambda: decode.state(rid_of(1)) is State.RECEIVING, "its pages are promised")
    old.transfer.close()
    pair.turn(lambda: lost.end is not None and decode.idle(), "decode's room failed and is free", prefill=False)
    assert (lost.failed.status, lost.failed.code) == (503, "transfer_failed")
    assert "gone" in lost.failed.message
    again = Pair(make("prefill"), decode)
    _, answer = again.ask(rid_of(2), prompt(40))
    again.turn_to_end(answer)
    assert answer.end == "length"
    again.turn_to_idle()


def test_a_dead_decode_worker_frees_its_rooms_on_prefill(make: Make) -> None:
    prefill, decode = make("prefill", flags={"transfer_hold": True}), make("decode")
    pair = Pair(prefill, decode)
    first, _ = pair.ask(rid_of(1), prompt(40))
    pair.turn(lambda: prefill.state(rid_of(1)) is State.TRANSFERRING, "it is being sent")
    decode.transfer.close()
    pair.turn(lambda: first.end is not None and prefill.idle(), "prefill's room failed and is free", decode=False)
    assert first.failed.code == "transfer_failed" and "decode worker is gone" in first.failed.message


def test_a_scheduler_that_stands_still_loses_its_rooms(make: Make) -> None:
    pair = Pair(make("prefill", **QUICK), make("decode", stall_timeout_s=1.0, **QUICK))
    _, answer = pair.ask(rid_of(1), prompt(40), legs="pd")
    # Prefill's I/O thread lives and pings, but its loop never turns.
    pair.turn(lambda: answer.end is not None, "decode gives up", prefill=False)
    assert "has not moved" in answer.failed.message
    pair.turn_to_idle()


def test_unified_workers_that_prefill_for_each_other_never_wait_for_ever(make: Make) -> None:
    """Both first promise all the pages they may to decode legs; only then do the prefill legs come, and must still find room."""
    flags: dict[str, object] = {"max_rows": 8}
    a, b = make("unified", pages=16, flags=flags), make("unified", pages=16, flags=flags)
    there, back = Pair(a, b), Pair(b, a)
    pairs = [(there if n % 2 else back, n) for n in range(1, 13)]
    ids = {n: prompt(50, seed=n) for _, n in pairs}
    decode = [pair.ask(rid_of(n), ids[n], 15, room=n, legs="d")[1] for pair, n in pairs]
    there.turn(lambda: all(sum(r.state is State.RECEIVING for r in w.book.requests.values()) >= 2 for w in (a, b)), "decode legs hold what they may")
    prefill = [pair.ask(rid_of(n), ids[n], 15, room=n, legs="p")[0] for pair, n in pairs]
    plain = [w.admit(rid_of(100 + n), ids[n], 20) for w in (a, b) for _, n in pairs]
    there.turn(lambda: all(x.end is not None for x in (*decode, *prefill, *plain)), "all end", 30)
    assert all(x.end == "length" for x in (*decode, *plain)), [x.end for x in (*decode, *plain)]
    assert all(isinstance(x.end, m.HandedOver) for x in prefill)
    there.turn_to_idle()


def test_a_unified_worker_may_hand_over_to_itself(make: Make) -> None:
    worker = make("unified")
    pair = Pair(worker, worker)
    worker.scheduler.handle(m.Admit(rid=rid_of(1), ids=b"\7\0\0\0" * 50, max_new=6, temperature=0.0, leg="prefill", room=4))
    worker.scheduler.handle(
        m.Admit(rid=rid_of(2), ids=b"\7\0\0\0" * 50, max_new=6, temperature=0.0, leg="decode", room=4, bootstrap=worker.bootstrap)
    )
    answer = worker.inbox.of(rid_of(2))
    pair.turn_to_end(worker.inbox.of(rid_of(1)), answer)
    assert answer.ids == VirtualScheduler().answer([7] * 50, 6)
    pair.turn_to_idle()


def test_a_transfer_that_closes_leaves_nothing_half_done(make: Make) -> None:
    """Seen red: who had not yet sent a whole question was left to the garbage collector, on a loop that was closed."""
    transfer = make("prefill").transfer

    async def under_way() -> set[asyncio.Task[object]]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    def tasks() -> set[asyncio.Task[object]]:
        return asyncio.run_coroutine_threadsafe(under_way(), transfer._loop).result()

    ports = (transfer.bootstrap_port, transfer.transfer_port)
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        wait_for(lambda: len(tasks()) > len(ports), "both are being served, beside the ticker")
        seen = tasks()
        transfer.close()
    assert all(task.done() for task in seen), seen


@pytest.mark.parametrize("room", [-1, 2**63, 0])
def test_a_room_that_is_none_is_refused(pair: Pair, room: int) -> None:
    answer = pair.prefill.admit(rid_of(1), prompt(20), leg="prefill", room=room)
    assert (answer.failed.status, answer.failed.code) == (400, "invalid_room")
    pair.turn_to_idle()


def test_random_rooms_with_random_aborts_leave_no_page_behind(make: Make) -> None:
    rng = random.Random(20)
    flags: dict[str, object] = {"max_rows": 6, "max_step_tokens": 64}
    pair = Pair(make("prefill", pages=64, flags=flags), make("decode", pages=64, flags=flags))
    shared = prompt(64, seed=5)
    reference: dict[str, tuple[list[int], int]] = {}
    answers: dict[str, tuple[Answer, Answer]] = {}
    aborts: list[tuple[float, str]] = []
    for n in range(200):
        rid = rid_of(n + 1)
        ids = shared[: rng.choice([0, 16, 40, 64])] + prompt(rng.randint(1, 120), seed=n)
        reference[rid] = (ids, rng.randint(1, 40))
        answers[rid] = pair.ask(rid, *reference[rid], room=n + 1)
        if rng.random() < 0.4:
            aborts.append((time.monotonic() + rng.uniform(0, 0.05), rid))
        for _ in range(rng.randint(0, 6)):
            pair.prefill.scheduler.iterate()
            pair.decode.scheduler.iterate()
        for at, victim in list(aborts):
            if at <= time.monotonic():
                aborts.remove((at, victim))
                for side in rng.choice([(pair.prefill,), (pair.decode,), (pair.prefill, pair.decode)]):
                    side.scheduler.handle(m.Abort(rid=victim))
    pair.turn(lambda: all(p.end is not None and d.end is not None for p, d in answers.values()), "every leg ends", 60)
    pair.turn_to_idle()
    unified = VirtualScheduler(flags_of(256))
    complete = [rid for rid, (_, d) in answers.items() if d.end == "length"]
    assert len(complete) >= 100
    for rid in complete:
        assert answers[rid][1].ids == unified.answer(*reference[rid])
    assert pair.decode.scheduler.counters()["prefilled_tokens_total"] == 0
    assert pair.decode.scheduler.counters()["transfer_checksum_failures_total"] == 0
