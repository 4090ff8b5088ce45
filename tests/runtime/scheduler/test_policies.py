"""Who is next, who gives way, and that nobody waits for ever: schedule policies, long prompts beside short ones, a pool that is too small."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_runtime import messages as m
from fleet_runtime.cache.memory import KvMemory
from fleet_runtime.scheduler.order import MOST_LOOKUPS, ORDERS
from fleet_runtime.scheduler.policy import plan_chunks
from fleet_runtime.scheduler.ratio import DECAY_STEPS, LEAST_SHARE, NewTokenRatio, victims
from fleet_runtime.scheduler.request import Request
from fleet_testing.fake_engine import expected
from fleet_testing.scheduler_harness import Answer, FakeWorker, admit, rid_of


def prompt(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def served(worker: FakeWorker) -> list[str]:
    """Requests in the order of their first token."""
    order: list[str] = []
    while worker.scheduler.iterate():
        order += [rid for (rid, _), a in worker.inbox.answers.items() if (a.ids or a.end) and rid not in order]
    return order


# Order.


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [1, 2, 3, 4]),
        ("priority", [3, 1, 4, 2]),
        ("lpm", [4, 2, 1, 3]),
        ("dfs-weight", [2, 1, 4, 3]),
    ],
)
def test_waiting_requests_run_in_the_order_of_the_policy(policy: str, order: list[int]) -> None:
    worker = FakeWorker(256, schedule_policy=policy, max_rows=1)
    a, b = prompt(64, seed=1), prompt(64, seed=2)
    worker.answer(a, 2)
    worker.answer(b + prompt(32, seed=3), 2)
    running = worker.admit(rid_of(9), prompt(5), 30)
    worker.scheduler.iterate()
    # Cached: 1: 16 tokens of a; 2: 64 of a; 3: nothing; 4: 96 of b. Two of the four are in a's branch.
    prompts = [a[:16] + prompt(50, seed=11), a + prompt(10, seed=12), prompt(40, seed=13), b + prompt(32, seed=3) + prompt(9, seed=14)]
    for n, (ids, priority) in enumerate(zip(prompts, (1, 0, 5, 1), strict=True), start=1):
        worker.admit(rid_of(n), ids, 2, priority=priority)
        worker.clock.advance(0.001)
    assert served(worker)[-4:] == [rid_of(n) for n in order]
    assert running.end == "length"


def test_a_long_queue_is_served_by_arrival_without_asking_the_tree() -> None:
    memory = KvMemory(8)
    waiting = [Request.from_admit(admit(rid_of(n), prompt(40, seed=n), priority=-n), float(n)) for n in range(MOST_LOOKUPS + 1)]
    memory.peek = lambda *args: pytest.fail("a lookup")  # type: ignore[method-assign]
    for policy in ("fcfs", "lpm", "dfs-weight"):
        assert ORDERS[policy](waiting, memory) == waiting


# Chunks.


@given(st.integers(16, 300), st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_one_prompt_is_cut_at_a_time_and_goes_on_at_half_speed_at_least(budget: int, left: list[int]) -> None:
    chunks = dict(plan_chunks(budget, left))
    assert sum(chunks.values()) <= budget
    assert 0 in chunks, "the oldest goes on"
    cut = [i for i, n in chunks.items() if n < left[i]]
    assert len(cut) <= 1
    if left[0] > budget:
        assert chunks[0] >= max(16, budget // 2 // 16 * 16) and chunks[0] % 16 == 0


@pytest.mark.case("C95")
@pytest.mark.parametrize("longs", [1, 2])
def test_short_prompts_do_not_wait_for_a_long_one_and_running_answers_keep_their_pace(longs: int) -> None:
    """C95: chunk 256, a prompt of 8k (or two), then short ones. Seen red with `PrefillAdder.whole_room` without a share for prompts that fit
    whole: each short prompt then waited for the whole of the long one."""
    worker = FakeWorker(1500, max_step_tokens=256, context_length=20_000)
    running = worker.admit(rid_of(0), prompt(10), 500)
    worker.scheduler.iterate()
    long = [worker.admit(rid_of(1 + n), prompt(8000, seed=2 + n), 1) for n in range(longs)]
    worker.scheduler.iterate()
    n = 10
    while long[0].end is None:
        n += 1
        short = worker.admit(rid_of(n), prompt(20, seed=n), 3)
        before, steps = len(running.ids), worker.engine.steps
        while not short.ids:
            worker.scheduler.iterate()
        assert worker.engine.steps - steps <= 3, "about one chunk"
        assert len(running.ids) - before >= 1
    assert worker.engine.steps < 2 * 8000 / 256 + 20, "the long one goes on at half speed at least"
    worker.run()
    assert all(a.end == "length" for a in long)


def test_without_mixed_steps_prompts_and_answers_alternate() -> None:
    worker = FakeWorker(256, mixed_chunk=False, max_step_tokens=32, max_prefill_steps=3)
    kinds: list[set[bool]] = []
    step = worker.engine.forward

    def spy(batch):  # type: ignore[no-untyped-def]
        kinds.append({bool(n > 1) for n in (batch.row_starts[1:] - batch.row_starts[:-1])})
        step(batch)

    worker.engine.forward = spy  # type: ignore[method-assign]
    running = worker.admit(rid_of(0), prompt(10), 50)
    worker.scheduler.iterate()
    worker.admit(rid_of(1), prompt(640, seed=2), 1)
    worker.run()
    assert all(len(kind) == 1 for kind in kinds), "no step has both"
    pauses = "".join("p" if True in kind else "d" for kind in kinds[1:])
    assert "pppp" not in pauses and pauses.count("p") >= 20 and running.end == "length"


# The share of answers that is reserved.


def test_the_ratio_falls_while_all_is_well_rises_at_a_retraction_and_starts_anew_at_idle() -> None:
    ratio = NewTokenRatio(0.7)
    for _ in range(DECAY_STEPS // 2):
        ratio.decay()
    assert ratio.value == pytest.approx(0.7 * (1 + LEAST_SHARE) / 2)
    for _ in range(DECAY_STEPS):
        ratio.decay()
    assert ratio.value == pytest.approx(0.7 * LEAST_SHARE)
    request = Request.from_admit(admit(rid_of(1), [1], 100), 0.0)
    request.length += 30
    ratio.retracted([request, request])
    assert ratio.value == pytest.approx((60 + 40) / 201)
    ratio.reset()
    assert ratio.value == 0.7 and not ratio.promises_all and NewTokenRatio(1.0).promises_all


def test_who_has_answered_least_gives_way_first_and_one_always_stays() -> None:
    def request(n: int, prompt_tokens: int, done: int) -> Request:
        out = Request.from_admit(admit(rid_of(n), [1] * prompt_tokens, 100), float(n))
        out.length += done
        return out

    a, b, c = request(1, 10, 50), request(2, 10, 5), request(3, 90, 5)
    assert victims([a, b, c]) == [c, b] and victims([a]) == [] and victims([]) == []


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_with_a_ratio_of_one_nothing_is_ever_retracted(seed: int) -> None:
    rng = random.Random(seed)
    worker = FakeWorker(16, new_token_ratio=1.0, max_rows=6, queue_timeout=10_000)
    answers = [worker.admit(rid_of(n), prompt(rng.randint(1, 60), seed=n), rng.randint(1, 100), stop_ids=[3]) for n in range(12)]
    worker.run()
    assert worker.book.totals.retractions == 0 and all(a.end in ("stop", "length") for a in answers)
    worker.assert_idle()


def test_retracted_requests_resume_before_new_ones_begin() -> None:
    worker = FakeWorker(12, new_token_ratio=0.01, queue_timeout=1000)
    first = [worker.admit(rid_of(n), prompt(30, seed=n), 120, stop_ids=[999]) for n in range(3)]
    while not worker.book.totals.retractions:
        worker.scheduler.iterate()
    late = worker.admit(rid_of(50), prompt(30, seed=50), 120, stop_ids=[999])
    worker.clock.advance(1)
    while not late.ids:
        worker.scheduler.iterate()
    assert all(r.state.value != "waiting" for r in worker.book.requests.values() if r.retractions)
    worker.run()
    for n, answer in enumerate(first):
        assert answer.ids == expected(prompt(30, seed=n), 120) and answer.completion_tokens == 120


# Cases of the field.


@pytest.mark.case("C91")
def test_what_can_never_fit_is_refused_and_those_behind_it_are_served() -> None:
    """C91: a pool of 512 tokens, a context of 1024, a prompt of 500 and 400 to answer. Seen red with a refusal that looked at the prompt
    alone."""
    worker = FakeWorker(32, context_length=1024)
    never = worker.admit(rid_of(1), prompt(500), 400, stop_ids=[])
    short = [worker.admit(rid_of(2 + n), prompt(20, seed=n), 5) for n in range(3)]
    assert (never.failed.status, never.failed.code) == (400, "kv_capacity_exceeded") and "900" not in never.failed.message[:4]
    worker.run()
    assert all(a.end == "length" for a in short)
    worker.assert_idle()


@pytest.mark.case("C92")
def test_the_only_request_that_fills_the_pool_ends_with_an_error_and_the_worker_lives() -> None:
    """C92: nothing is left to retract. Entry refuses what can never fit, so pages that leaked stand for the rest here. Seen red with a
    `victims` that may name the last one: it was retracted and admitted for ever."""
    worker = FakeWorker(8, new_token_ratio=0.01)
    kept = worker.book.memory.admit(b"", prefix_pages=0, total_pages=4)
    assert kept is not None and worker.book.memory.grow(kept, 4)
    worker.scheduler._flags = worker.flags.model_copy(update={"debug_checks": False})
    only = worker.admit(rid_of(1), prompt(20), 100, stop_ids=[999])
    worker.run()
    assert (only.failed.status, only.failed.code) == (503, "kv_exhausted") and only.ids == expected(prompt(20), len(only.ids)) != []
    worker.book.memory.release(kept)
    assert worker.answer(prompt(20), 100) == expected(prompt(20), 100)
    worker.assert_idle()


@pytest.mark.case("C94")
def test_aborted_ids_can_be_sent_again_and_late_or_empty_aborts_hit_nobody() -> None:
    """C94: 4 run, 20 wait; all aborted three times, sent again at once. Seen red with tombstones for every aborted id, as it was
    before: the same id could not be sent again for a minute."""
    worker = FakeWorker(64, max_rows=4)
    ask = lambda: [worker.admit(rid_of(n), prompt(20, seed=n), 30) for n in range(24)]  # noqa: E731
    first = ask()
    for _ in range(5):
        worker.scheduler.iterate()
    for _ in range(3):
        for n in range(24):
            worker.scheduler.handle(m.Abort(rid=rid_of(n)))
    assert all(a.failed.code == "aborted" for a in first)
    worker.inbox.answers.clear()
    again = ask()
    worker.scheduler.handle(m.Abort(rid=""))
    worker.scheduler.handle(m.Abort(rid=rid_of(0)[:8]))
    worker.run()
    assert all(a.ids == expected(prompt(20, seed=n), 30) for n, a in enumerate(again))
    for n in range(24):
        worker.scheduler.handle(m.Abort(rid=rid_of(n)))
    assert all(a.end == "length" for a in again)
    worker.assert_idle()


def _mixed(worker: FakeWorker, n: int) -> Answer:
    fields: dict[str, object] = [{}, {"logprobs": 1}, {"embed": "mean"}, {"grammar": m.Grammar("regex", "[ab]{3}")}][n % 4]
    answer = worker.admit(rid_of(n), prompt(1 + n % 40, seed=n % 7), 0 if n % 4 == 2 else 3, **fields)
    if n % 5 == 0:
        worker.scheduler.iterate()
        worker.scheduler.handle(m.Abort(rid=rid_of(n)))
    worker.run()
    worker.inbox.answers.clear()
    return answer


@pytest.mark.case("C97")
def test_the_schedulers_memory_does_not_grow_with_requests() -> None:
    """C97. Tombstones of aborted ids live for a minute, so time passes too. Seen red with `by_rid` kept."""
    worker = FakeWorker(16, debug_checks=False)
    for n in range(120):
        _mixed(worker, n)
    tracemalloc.start()
    try:
        worker.clock.advance(100)
        _mixed(worker, 300)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for n in range(301, 800):
            _mixed(worker, n)
            worker.clock.advance(1)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 40_000, f"{grown} bytes for 500 requests"
    worker.assert_idle()


@pytest.mark.case("C98")
def test_every_request_ends_once_while_neighbours_die_and_time_runs_out() -> None:
    """C98: many at once, http or detokenizer gone in the middle, short deadlines. Seen red with a `drop_all` that forgot requests whose grammar
    was being compiled."""
    rng = random.Random(5)
    worker = FakeWorker(24, max_rows=6, max_queue=64, queue_timeout=3, new_token_ratio=0.05)
    answers: list[Answer] = []
    compilations: list[Callable[[], None]] = []
    worker.book.grammars._spawn = compilations.append
    for n in range(400):
        fields: dict[str, object] = {"grammar": m.Grammar("regex", f"[a-z]{{{n % 9}}}")} if n % 7 == 0 else {}
        if n % 11 == 0:
            fields["deadline"] = worker.clock() + 0.01
        answers.append(worker.admit(rid_of(n), prompt(rng.randint(1, 60), seed=n), rng.randint(1, 40), stop_ids=[4], **fields))
        if n in (14, 301):  # right behind a request with a grammar
            worker.scheduler.drop_all("the http process is gone")
            assert not worker.book.requests
        if rng.random() < 0.3:
            worker.scheduler.iterate()
        while compilations and rng.random() < 0.5:
            compilations.pop(0)()
    for compilation in compilations:
        compilation()
    worker.run()
    worker.clock.advance(10)
    worker.run()
    assert all(len(a.ends) == 1 for a in answers)
    ends = {a.end.code if isinstance(a.end, m.Failed) else a.end for a in answers}
    assert {"peer_failed", "length", "queue_full"} <= ends
    worker.assert_idle()
