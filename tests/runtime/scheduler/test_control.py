"""Control calls, the self-check at idle, the engine thread, and where the loop's time goes."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet_runtime import messages as m
from fleet_runtime.cache import pages as owners
from fleet_runtime.engine.base import greedy
from fleet_runtime.scheduler.batch import build_step, row_of
from fleet_runtime.scheduler.request import Request, State
from fleet_runtime.scheduler.rows import Rows
from fleet_runtime.scheduler.runner import ThreadRunner
from fleet_testing.fake_engine import FakeEngine, expected
from fleet_testing.scheduler_harness import FakeWorker, admit, rid_of, wait_for


def prompt(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def data(reply: m.ControlReply | None, status: int = 200) -> dict[str, Any]:
    assert reply is not None and reply.status == status, reply
    return msgspec.json.decode(reply.data)  # type: ignore[no-any-return]


# Flush.


@pytest.mark.case("C103")
def test_a_flush_is_refused_while_requests_run_or_wait_and_empties_the_cache_at_idle() -> None:
    """C103. Seen red with a flush that looked at running requests only: it went through with one in the queue."""
    worker = FakeWorker(max_rows=1)
    ids = prompt(64)
    worker.admit(rid_of(1), ids, 20)
    assert data(worker.control("flush_cache"), 409)["code"] == "busy", "queued only"
    worker.scheduler.iterate()
    worker.admit(rid_of(2), ids, 20)
    assert "1 run, 1 wait" in data(worker.control("flush_cache"), 409)["message"]
    worker.run()
    assert data(worker.control("flush_cache"))["flushed_tokens"] == 80
    for n in range(20):  # right behind the end of a request
        answer = worker.admit(rid_of(10 + n), ids, 1)
        while answer.end is None:
            worker.scheduler.iterate()
        assert data(worker.control("flush_cache"))["flushed_tokens"] == 64
        assert data(worker.control("flush_cache"))["flushed_tokens"] == 0
        assert answer.cached_tokens == 0
    assert worker.answer(ids, 5) == expected(ids, 5)
    worker.assert_idle()


def test_a_flush_that_waits_happens_when_the_last_request_has_ended() -> None:
    worker = FakeWorker()
    answer = worker.admit(rid_of(1), prompt(40), 10)
    worker.scheduler.iterate()
    assert worker.control("flush_cache", wait_s=60) is None
    worker.run()
    assert answer.end == "length" and data(worker.inbox.replies["1"])["flushed_tokens"] == 48
    assert worker.book.memory.pages.count(0) == 64


def test_a_flush_waits_no_longer_than_it_was_told() -> None:
    worker = FakeWorker()
    worker.admit(rid_of(1), prompt(40), 900)
    worker.scheduler.iterate()
    assert worker.control("flush_cache", wait_s=1) is None
    worker.clock.advance(1)
    worker.scheduler.iterate()
    assert data(worker.inbox.replies["1"], 409)["code"] == "busy"


# The others.


def test_a_pause_starts_no_step_and_loses_nothing() -> None:
    worker = FakeWorker()
    running = worker.admit(rid_of(1), prompt(20), 20)
    for _ in range(4):
        worker.scheduler.iterate()
    assert data(worker.control("pause")) == {"paused": True}
    worker.run()
    steps, waiting = worker.engine.steps, worker.admit(rid_of(2), prompt(20, seed=2), 5)
    worker.run()
    assert worker.engine.steps == steps and not waiting.ids and running.end is None
    worker.scheduler.handle(m.Abort(rid=rid_of(9)))
    assert data(worker.control("continue")) == {"paused": False}
    worker.run()
    assert running.ids == expected(prompt(20), 20) and waiting.ids == expected(prompt(20, seed=2), 5)


def test_a_drain_ends_a_pause() -> None:
    worker = FakeWorker()
    assert data(worker.control("pause")) == {"paused": True}
    answer = worker.admit(rid_of(1), [1, 2, 3], 4)
    worker.run()
    assert not answer.ids
    worker.scheduler.handle(m.Drain(deadline=worker.clock() + 60))
    worker.run()
    assert answer.end == "length" and len(answer.ids) == 4


def test_the_log_level_changes_and_a_wrong_one_is_named() -> None:
    worker, root = FakeWorker(), logging.getLogger()
    before = root.level
    try:
        assert data(worker.control("log_level", level="error")) == {"level": "error"}
        assert root.level == logging.ERROR
        assert "debug, info" in data(worker.control("log_level", level="loud"), 400)["message"]
    finally:
        root.setLevel(before)


@pytest.mark.parametrize(
    ("op", "args"),
    [("flash", {}), ("flush_cache", {"wait_s": -1}), ("flush_cache", {"wait_s": "x"}), ("profile", {"steps": 0}), ("profile", {"steps": True})],
)
def test_a_wrong_call_is_the_callers_error(op: str, args: dict[str, object]) -> None:
    worker = FakeWorker()
    assert data(worker.control(op, **args), 400)["message"]
    assert worker.answer(prompt(20), 3) == expected(prompt(20), 3)


def test_a_profile_says_where_the_time_of_each_step_goes() -> None:
    worker = FakeWorker()
    worker.admit(rid_of(1), prompt(20), 200)
    assert worker.control("profile", steps=50) is None
    assert data(worker.control("profile", steps=50), 409)["code"] == "busy"
    worker.run()
    profile = data(worker.inbox.replies["1"])
    assert 50 <= profile["steps"] <= 51
    stages = profile["stages"]
    assert {"receive", "admit", "build", "process", "send", "executor"} <= set(stages)
    assert sum(s["share"] for s in stages.values()) == pytest.approx(1.0, abs=0.01)
    assert all(s["p99_us"] >= s["p50_us"] >= 0 for s in stages.values())
    assert worker.scheduler.stages.samples.keys() and not worker.scheduler.stages.profiling


def test_a_profile_of_an_idle_worker_ends_when_its_time_is_up() -> None:
    worker = FakeWorker()
    assert worker.control("profile", steps=50, timeout_s=2) is None
    worker.clock.advance(2)
    worker.scheduler.iterate()
    assert data(worker.inbox.replies["1"]) == {"steps": 0, "stages": {}}


def test_internals_say_what_is_queued_and_who_holds_pages() -> None:
    worker = FakeWorker(max_rows=1, schedule_policy="lpm", new_token_ratio=0.5)
    worker.admit(rid_of(1), prompt(20), 20)
    worker.admit(rid_of(2), prompt(30), 20)
    worker.scheduler.iterate()
    seen = data(worker.control("internals"))
    assert (seen["running"], seen["waiting"], seen["waiting_tokens"]) == (1, 1, 30)
    assert seen["schedule_policy"] == "lpm" and seen["new_token_ratio"] == pytest.approx(0.5, abs=0.01)
    assert seen["queues"]["plain"] == 1 and sum(seen["pages"][k] for k in ("free", "tree", "request")) == 64


# The self-check.


def _break_owner(worker: FakeWorker) -> None:
    worker.book.memory.pages.take(2)  # a leak


def _break_promise(worker: FakeWorker) -> None:
    worker.book.memory.promised += 3


def _break_locks(worker: FakeWorker) -> None:
    node = next(iter(worker.book.memory.tree.nodes()))
    worker.book.memory.tree.lock(node)


def _break_rows(worker: FakeWorker) -> None:
    worker.book.rows._free.pop()


def _break_held(worker: FakeWorker) -> None:
    worker.book.held.rows[next(iter(worker.book.held.rows))] += 1


@pytest.mark.case("C100")
@pytest.mark.parametrize("damage", [_break_owner, _break_promise, _break_locks, _break_rows, _break_held])
def test_a_fault_in_the_books_is_counted_and_repaired_at_idle_and_kills_nobody(damage, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    """C100. Seen red with each of the five faults and a `SelfCheck.run` that only looks."""
    worker = FakeWorker(debug_checks=False)
    ids = prompt(64)
    worker.answer(ids, 5)
    damage(worker)
    for _ in range(70):
        worker.clock.advance(1)
        worker.scheduler.iterate()
    assert worker.scheduler.counters()["self_check_failures_total"] == 1
    assert "repaired" in caplog.text
    worker.assert_idle()
    assert worker.answer(ids, 5) == expected(ids, 5)


def test_books_that_contradict_themselves_cost_the_cache_and_not_the_worker() -> None:
    worker = FakeWorker(debug_checks=False)
    worker.answer(prompt(64), 5)
    tree = worker.book.memory.tree
    node = next(iter(tree.nodes()))
    node.pages[-1] = node.pages[0]  # one page twice
    for _ in range(70):
        worker.clock.advance(1)
        worker.scheduler.iterate()
    assert worker.scheduler.counters()["self_check_failures_total"] == 1
    worker.assert_idle()
    assert worker.book.memory.pages.count(0) == 64
    assert worker.answer(prompt(64), 5) == expected(prompt(64), 5)


def _begin_anew(worker: FakeWorker) -> None:
    """Damages the books beyond repair, and waits for the self-check."""
    worker.answer(prompt(64), 5)
    node = next(iter(worker.book.memory.tree.nodes()))
    node.pages[-1] = node.pages[0]
    for _ in range(70):
        worker.clock.advance(1)
        worker.scheduler.iterate()


def test_after_the_cache_began_anew_pages_come_back_from_requests_that_end_under_a_step() -> None:
    """Seen red with the lost pages at the head of those that are set aside: no page behind them ever became free again."""
    worker = FakeWorker(debug_checks=False)
    _begin_anew(worker)
    for n in range(12):
        other = worker.admit(rid_of(100 + n), prompt(20, seed=n), 12)
        answer = worker.admit(rid_of(n), prompt(100, seed=n), 50)
        while len(answer.ids) < 5:
            worker.scheduler.iterate()
        assert worker.scheduler.outstanding
        worker.scheduler.handle(m.Abort(rid=rid_of(n)))
        worker.run()
        assert other.end == "length" and worker.scheduler.counters()["pages_request"] == 0
    worker.assert_idle()


def test_pages_that_are_lost_stay_lost_whatever_is_repaired_later() -> None:
    """Seen red with a rebuild that knew nothing of them: a page that a transfer may still write to was given to others."""
    worker = FakeWorker(debug_checks=False)
    memory = worker.book.memory
    memory.start_anew([3, 5])
    for again in (lambda: memory.rebuild([]), lambda: memory.start_anew([7])):
        again()
        memory.check_integrity([])
        assert all(memory.pages.owner(page) == owners.REQUEST for page in (3, 5))
    assert worker.answer(prompt(200), 5) == expected(prompt(200), 5)
    memory.check_integrity([])
    assert [page for page in range(64) if memory.pages.owner(page) == owners.REQUEST] == [3, 5, 7]


def test_a_sound_worker_finds_no_fault_while_requests_wait_for_their_neighbours() -> None:
    worker = FakeWorker(debug_checks=False)
    worker.book.grammars._spawn = lambda job: None  # it compiles for ever
    worker.admit(rid_of(1), prompt(20), 5, grammar=m.Grammar("regex", "x"), deadline=worker.clock() + 1000)
    for _ in range(130):
        worker.clock.advance(0.03)
        worker.scheduler.iterate()
    assert worker.scheduler.counters()["self_check_failures_total"] == 0
    assert [r.state for r in worker.book.requests.values()] == [State.COMPILING]


# The engine thread.


def _batch(engine: FakeEngine):  # type: ignore[no-untyped-def]
    worker = FakeWorker()
    worker.admit(rid_of(1), prompt(20), 5)
    request = next(iter(worker.book.requests.values()))
    assert worker.book.try_lease(request) and request.lease is not None
    worker.book.memory.grow(request.lease, 2)
    return build_step([row_of(request, 20)], worker.book.rows)


def test_the_thread_computes_steps_in_order_and_wakes_the_loop() -> None:
    engine, order, gate = FakeEngine(64), list[str](), threading.Event()
    forward = engine.forward

    def slow(batch):  # type: ignore[no-untyped-def]
        gate.wait(20)
        order.append("forward")
        forward(batch)

    engine.forward = slow  # type: ignore[method-assign]
    runner = ThreadRunner(engine)
    try:
        batch = _batch(engine)
        first = runner.step(batch, greedy(1))
        second = runner.forward(batch)
        assert not first.done and not second.done
        gate.set()
        wait_for(lambda: first.done, "the first step is done")
        runner.drain_wake()
        assert first.result().tokens.tolist() == [expected(prompt(20), 1)[0]]
        runner.sample(second, greedy(1))
        wait_for(lambda: second.done, "the second, too")
        assert order == ["forward", "forward"] and second.begun >= first.ended
    finally:
        runner.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_of_the_executor_comes_out_in_the_loops_thread(late: bool) -> None:
    engine = FakeEngine(64)
    engine.forward = lambda batch: (_ for _ in ()).throw(MemoryError("the device is gone"))  # type: ignore[method-assign]
    runner = ThreadRunner(engine)
    try:
        ticket = runner.forward(_batch(engine)) if late else runner.step(_batch(engine), greedy(1))
        if late:
            runner.sample(ticket, greedy(1))
        wait_for(lambda: ticket.done, "it failed")
        with pytest.raises(MemoryError, match="the device is gone"):
            ticket.result()
    finally:
        runner.close()


def test_a_row_is_never_read_before_its_own_request_has_drawn_in_it() -> None:
    rows = Rows(1)
    first, second = (Request.from_admit(admit(rid_of(n), [1]), 0.0) for n in (1, 2))
    rows.take(first)
    with pytest.raises(AssertionError, match="before it was drawn"):
        rows.relay(first)
    rows.drawn(first)
    assert rows.relay(first) == -1
    rows.give(first)
    rows.take(second)
    with pytest.raises(AssertionError, match="before it was drawn"):
        rows.relay(second)
    rows.check_integrity([second])
    with pytest.raises(AssertionError, match="two owners"):
        rows.check_integrity([])
    assert np.array_equal(np.arange(rows.count), [0])
