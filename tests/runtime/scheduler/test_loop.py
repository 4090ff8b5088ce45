"""The scheduler loop over a virtual clock and the simulated executor, all checks on after every step."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_contract.wire import encode_ids
from fleet_runtime import messages as m
from fleet_runtime.engine.base import Sampling, StepInput, StepOutput, greedy
from fleet_runtime.engine.simulated import SimulatedExecutor
from fleet_runtime.scheduler.request import State
from fleet_testing.scheduler_harness import Answer, VirtualScheduler, flags_of, rid_of


def prompt(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def test_a_request_alone_in_a_batch_chunked_or_from_the_cache_gives_the_same_tokens() -> None:
    ids = prompt(200)
    alone = VirtualScheduler().answer(ids, 20)
    chunked = VirtualScheduler(flags_of(max_step_tokens=16))
    assert chunked.answer(ids, 20) == alone
    assert chunked.answer(ids, 20) == alone  # now from the cache
    assert chunked.scheduler.counters()["cached_tokens_total"] == 192
    batch = VirtualScheduler(flags_of(pages=512))
    answers = [batch.admit(rid_of(n), ids if n == 3 else prompt(90, seed=n + 9), 20) for n in range(8)]
    batch.run()
    assert answers[3].ids == alone and all(len(a.ids) == 20 for a in answers)


def test_the_next_turn_of_a_chat_reuses_prompt_and_answer() -> None:
    worker = VirtualScheduler()
    ids = prompt(100)
    first = worker.answer(ids, 30)
    second = worker.admit(rid_of(2), ids + first + prompt(20, seed=2), 4)
    worker.run()
    assert second.cached_tokens == 128  # 129 computed tokens: 8 whole pages
    assert second.ids == VirtualScheduler().answer(ids + first + prompt(20, seed=2), 4)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    worker = VirtualScheduler()
    ids = prompt(64)
    first = worker.answer(ids, 4)
    second = worker.admit(rid_of(2), ids, 4)
    worker.run()
    assert second.ids == first and second.cached_tokens == 48


def test_a_prompt_is_shared_as_soon_as_its_chunks_are_computed() -> None:
    worker = VirtualScheduler(flags_of(max_step_tokens=32))
    ids = prompt(100)
    first = worker.admit(rid_of(1), ids, 300)
    for _ in range(2):
        worker.scheduler.iterate()
    second = worker.admit(rid_of(2), ids, 4)
    while second.end is None:
        worker.scheduler.iterate()
    assert first.end is None and second.cached_tokens == 96


def test_seeds_decide_sampled_tokens_whatever_else_runs() -> None:
    worker = VirtualScheduler()
    one = worker.answer(prompt(20), 16, temperature=0.8, seed=5)
    for n in range(3):
        worker.admit(rid_of(n), prompt(30, seed=n), 16, temperature=1.0, seed=n)
    assert worker.answer(prompt(20), 16, temperature=0.8, seed=5) == one
    assert worker.answer(prompt(20), 16, temperature=0.8, seed=6) != one


def test_a_stop_id_wins_over_the_length_and_is_counted_but_not_sent() -> None:
    tokens = VirtualScheduler().answer(prompt(20), 6)
    at = tokens.index(tokens[5])  # the first place of that token
    worker = VirtualScheduler()
    answer = worker.admit(rid_of(1), prompt(20), 6, stop_ids=[tokens[5], 257])
    worker.run()
    assert (answer.end, answer.ids, answer.completion_tokens) == ("stop", tokens[:at], at + 1)


def test_stopped_ends_the_choice_well_and_once() -> None:
    worker = VirtualScheduler()
    answer = worker.admit(rid_of(1), prompt(20), 600)
    for _ in range(5):
        worker.scheduler.iterate()
    worker.scheduler.handle(m.Stopped(rid=rid_of(1), index=0))
    assert worker.run() <= 1 and answer.end == "stop" and not worker.book.requests
    worker.scheduler.handle(m.Stopped(rid=rid_of(1), index=0))
    counters = worker.scheduler.counters()
    assert (counters["finished_requests_total"], counters["aborted_requests_total"], counters["pages_request"]) == (1, 0, 0)


def test_a_rid_that_comes_again_is_another_request_whatever_is_still_said_of_the_first() -> None:
    """The detokenizer has ended the first by a stop string; its word may come before the second request, after it, or after the first's own end."""
    for order in ("stopped first", "stopped late", "stopped after its end"):
        worker = VirtualScheduler()
        answer = worker.admit(rid_of(1), prompt(20), 8 if order == "stopped after its end" else 600)
        for _ in range(5):
            worker.scheduler.iterate()
        assert answer.opened is not None
        word = m.Stopped(rid=rid_of(1), index=0, serial=answer.opened.serial)
        if order == "stopped first":
            worker.scheduler.handle(word)
        elif order == "stopped after its end":
            worker.run()
        worker.scheduler.handle(m.Admit(rid=rid_of(1), ids=encode_ids(prompt(30)), max_new=5, temperature=0.0))
        worker.book.flush()
        assert isinstance(answer.end, str), order
        second = worker.inbox.answers[rid_of(1), 0] = Answer()
        if order != "stopped first":
            worker.scheduler.handle(word)
        worker.run()
        assert (second.end, len(second.ids)) == ("length", 5), order


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 12])
def test_an_abort_after_any_number_of_steps_ends_once_and_frees_all(steps: int) -> None:
    worker = VirtualScheduler(flags_of(max_step_tokens=32))
    answer = worker.admit(rid_of(1), prompt(120), 50)
    for _ in range(steps):
        worker.scheduler.iterate()
    for _ in range(2):
        worker.scheduler.handle(m.Abort(rid=rid_of(1), reason="client gone"))
    worker.run()
    assert (answer.failed.status, answer.failed.code, answer.failed.message) == (499, "aborted", "client gone")
    assert worker.scheduler.counters()["pages_request"] == 0
    # What was computed is a true prefix: the same prompt gives the same tokens.
    assert worker.answer(prompt(120), 10) == VirtualScheduler().answer(prompt(120), 10)


def test_an_abort_is_for_the_exact_rid_and_for_all_its_choices() -> None:
    worker = VirtualScheduler()
    for index in range(2):
        worker.scheduler.handle(m.Admit(rid="a" * 31, ids=b"\1\0\0\0", index=index, max_new=50))
    other = worker.admit("a" * 32, [1, 2], 5)
    worker.scheduler.iterate()
    worker.scheduler.handle(m.Abort(rid="a" * 31))
    worker.run()
    assert all(worker.inbox.of("a" * 31, index).failed.code == "aborted" for index in range(2))
    assert other.end == "length"


def test_an_abort_that_overtakes_its_request_wins_for_a_minute() -> None:
    worker = VirtualScheduler()
    for rid in (rid_of(1), rid_of(2)):
        worker.scheduler.handle(m.Abort(rid=rid))
    assert worker.admit(rid_of(1), [1], 3).failed.code == "aborted"
    worker.clock.advance(61)
    late = worker.admit(rid_of(2), [1], 3)
    worker.run()
    assert late.end == "length"


def test_a_second_admit_of_one_choice_is_ignored() -> None:
    worker = VirtualScheduler()
    answer = worker.admit(rid_of(1), prompt(20), 5)
    worker.admit(rid_of(1), prompt(30), 9)
    worker.run()
    assert answer.end == "length" and len(answer.ids) == 5


def test_the_queue_has_a_limit_and_a_timeout() -> None:
    worker = VirtualScheduler(flags_of(max_rows=1, max_queue=2, queue_timeout=5))
    running = worker.admit(rid_of(0), prompt(10), 900)
    worker.scheduler.iterate()
    waiting = [worker.admit(rid_of(n), prompt(10), 5) for n in (1, 2)]
    full = worker.admit(rid_of(3), prompt(10), 5)
    assert (full.failed.status, full.failed.code) == (429, "queue_full")
    worker.clock.advance(6)
    worker.scheduler.iterate()
    assert all((a.failed.status, a.failed.code) == (503, "queue_timeout") for a in waiting)
    assert running.end is None


def test_a_deadline_ends_a_request_without_a_first_token_and_no_other() -> None:
    worker = VirtualScheduler(flags_of(max_rows=1))
    running = worker.admit(rid_of(0), prompt(10), 900, deadline=worker.clock() + 1)
    worker.scheduler.iterate()
    late = worker.admit(rid_of(1), prompt(10), 5, deadline=worker.clock() + 1)
    worker.clock.advance(2)
    worker.scheduler.iterate()
    assert (late.failed.status, late.failed.code) == (504, "deadline_exceeded")
    assert running.end is None and len(running.ids) == 2


def test_what_can_never_fit_is_refused_and_what_just_fits_runs() -> None:
    worker = VirtualScheduler(pages=4)
    assert worker.admit(rid_of(1), prompt(60), 6).failed.code == "kv_capacity_exceeded"
    fits = worker.admit(rid_of(2), prompt(60), 5)
    worker.run()
    assert fits.end == "length"


def test_legs_are_refused_by_a_worker_without_that_role() -> None:
    worker = VirtualScheduler()
    assert worker.admit(rid_of(1), [1], leg="decode", room=1, bootstrap="h:1").failed.code == "wrong_role"


class _Faulty(SimulatedExecutor):
    """Says that rows whose first token is 13 are not finite."""

    def step(self, batch: StepInput, sampling: Sampling) -> StepOutput:
        output = super().step(batch, sampling)
        starts = batch.row_starts[:-1]
        output.failed[:] = batch.token_ids[starts] == 13
        return output


def test_a_row_that_is_not_finite_fails_only_its_request() -> None:
    worker = VirtualScheduler(executor=_Faulty(num_pages=64, profile=SimulatedExecutor.from_flags(flags_of()).profile, sleep=lambda s: None))
    bad = worker.admit(rid_of(1), [13, 1, 2], 5)
    good = worker.admit(rid_of(2), [1, 2, 3], 5)
    worker.run()
    assert (bad.failed.status, bad.failed.code) == (500, "numeric_error")
    assert good.end == "length" and good.ids == VirtualScheduler().answer([1, 2, 3], 5)


def test_what_is_not_finite_never_reaches_the_prefix_cache() -> None:
    """A chunk is checked though nothing is sampled from it: else the next request would build on its pages."""
    flags = flags_of(max_step_tokens=32)
    worker = VirtualScheduler(flags, executor=_Faulty(num_pages=64, profile=SimulatedExecutor.from_flags(flags).profile, sleep=lambda s: None))
    bad = worker.admit(rid_of(1), [*prompt(32), 13, *prompt(99)], 5)  # its second chunk is the bad one
    worker.run()
    assert bad.failed.code == "numeric_error"
    assert worker.scheduler.counters()["pages_tree"] == 2
    assert worker.scheduler.counters()["prefilled_tokens_total"] == 64, "nothing is computed on top of it"


def test_the_detokenizer_hears_of_requests_whose_http_process_is_gone() -> None:
    """Their first tokens may reach it after it heard of that death itself: it would keep them for ever."""
    worker = VirtualScheduler()
    running, waiting = worker.admit(rid_of(1), prompt(20), 50), worker.admit(rid_of(2), prompt(20), 50, index=1)
    worker.scheduler.iterate()
    waiting = worker.inbox.of(rid_of(2), 1)
    assert running.opened is not None
    worker.scheduler.drop_all("the http process is gone")
    assert running.failed.code == waiting.failed.code == "peer_failed"
    worker.run()  # the step that was out
    assert worker.book.requests == {} and worker.scheduler.counters()["pages_request"] == 0


def test_an_exception_in_the_handling_of_one_request_fails_only_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = VirtualScheduler()
    bad, good = worker.admit(rid_of(1), prompt(20), 5), worker.admit(rid_of(2), prompt(30), 5)
    emit = type(worker.book).emit

    def broken(book: object, request: object, ids: list[int], finish: str | None, **more: object) -> None:
        if request.key == (rid_of(1), 0):  # type: ignore[attr-defined]
            raise ZeroDivisionError("boom")
        emit(worker.book, request, ids, finish, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(worker.book), "emit", broken)
    worker.run()
    assert (bad.failed.status, bad.failed.code) == (500, "internal") and "boom" in bad.failed.message
    assert good.end == "length"


def test_a_read_of_a_freed_page_shows() -> None:
    executor = SimulatedExecutor(num_pages=4, profile=SimulatedExecutor.from_flags(flags_of()).profile, sleep=lambda s: None)
    executor.poison([2])
    one = np.ones(1, dtype=np.int32)
    step = StepInput(
        token_ids=one, positions=17 * one, row_starts=np.array([0, 1], dtype=np.int32), context_lens=18 * one,
        page_tables=np.array([[2, 3]], dtype=np.int32), sample=np.ones(1, dtype=np.bool_), slots=np.zeros(1, dtype=np.int32),
    )  # fmt: skip
    assert executor.step(step, greedy(1)).failed[0]


def test_decode_never_pauses_longer_than_the_bound_under_a_flood_of_prompts() -> None:
    for step_tokens, rows in ((64, 4), (16, 12)):
        worker = VirtualScheduler(flags_of(pages=512, max_step_tokens=step_tokens, max_prefill_steps=3, max_rows=rows + 4))
        running = [worker.admit(rid_of(n), prompt(5, seed=n), 200) for n in range(rows)]
        while any(not a.ids for a in running):
            worker.scheduler.iterate()
        pause, flood = [0] * rows, 1000
        for _ in range(600):
            if len(worker.book.plain_queue) < 2:
                flood += 1
                worker.admit(rid_of(flood), prompt(150, seed=flood), 1)
            before = [len(a.ids) for a in running]
            worker.scheduler.iterate()
            for i, answer in enumerate(running):
                pause[i] = 0 if len(answer.ids) > before[i] or answer.end else pause[i] + 1
            assert max(pause) <= 3
        assert worker.scheduler.counters()["prefilled_tokens_total"] > 3000


@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_arrivals_and_aborts_end_once_each_and_return_every_page(seed: int) -> None:
    rng = random.Random(seed)
    worker = VirtualScheduler(flags_of(max_rows=rng.randint(1, 6), max_step_tokens=rng.choice([16, 48, 200]), max_queue=20), pages=24)
    shared = prompt(48, seed=3)
    answers: dict[str, Answer] = {}
    for n in range(60):
        rid = rid_of(n)
        answers[rid] = worker.admit(rid, shared[: rng.choice([0, 0, 20, 48])] + prompt(rng.randint(1, 100), seed=n), rng.randint(1, 60))
        for _ in range(rng.randint(0, 8)):
            worker.scheduler.iterate()
        if rng.random() < 0.3:
            worker.scheduler.handle(m.Abort(rid=rng.choice(list(answers))))
    worker.run()
    assert all(len(a.ends) == 1 for a in answers.values())
    assert not worker.book.requests and not worker.book.by_rid
    counters = worker.scheduler.counters()
    assert counters["pages_request"] == counters["running_requests"] == counters["waiting_requests"] == 0
    assert counters["finished_requests_total"] + counters["failed_requests_total"] + counters["aborted_requests_total"] == 60
    assert worker.book.memory.tree.protected == 0 and worker.book.memory.promised == 0


def test_three_thousand_steps_of_a_full_queue_starve_nobody() -> None:
    flags = flags_of(pages=64, debug_checks=False, max_rows=8, max_step_tokens=64)
    worker = VirtualScheduler(flags)
    rng, n, done = random.Random(1), 0, 0
    open_answers: list[Answer] = []
    while worker.scheduler.counters()["steps_total"] < 3_000:
        while worker.book.waiting < 4:
            n += 1
            open_answers.append(worker.admit(rid_of(n), prompt(rng.randint(1, 80), seed=n % 50), rng.randint(1, 40)))
        assert worker.scheduler.iterate()
        done += sum(a.end is not None for a in open_answers)
        open_answers = [a for a in open_answers if a.end is None]
        assert len(open_answers) <= 12
    worker.run()
    worker.book.check_integrity()
    assert done > 300
    assert all(r.state is not State.ENDED for r in worker.book.requests.values())
