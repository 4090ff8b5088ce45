"""Answers do not depend on what else runs, on chunks, cached prefixes, retractions or the overlap of steps."""

from __future__ import annotations

import itertools
import random

import pytest

from fleet_runtime import messages as m
from fleet_testing.fake_engine import expected
from fleet_testing.scheduler_harness import FakeWorker, VirtualScheduler, flags_of, rid_of
from fleet_testing.scheduler_run import Run


def prompt(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


@pytest.mark.parametrize("seed", range(16))
def test_random_runs_are_exact_and_give_everything_back(seed: int) -> None:
    """Seen red with pages freed at once while a step is out, with a `row_of` that looks at `length` without `drawing`, with a retraction that
    computes the prompt alone again, and with a reference to the wrong relay slot."""
    run = Run(seed).go(250)
    assert run.ended > 5


def test_the_random_runs_have_retractions_late_draws_and_tokens_thrown_away() -> None:
    """Else the test above would prove little."""
    counters = [Run(seed, check_every=50).go(250).worker for seed in range(6)]
    assert sum(w.scheduler.counters()["retractions_total"] for w in counters) > 5
    assert sum(w.scheduler.counters()["wasted_tokens_total"] for w in counters) > 5
    assert sum(w.engine.late_samples for w in counters) > 50


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("step_tokens", [16, 48, 512])
def test_the_simulated_executor_gives_the_same_tokens_alone_in_a_batch_and_from_the_cache(overlap: bool, mixed: bool, step_tokens: int) -> None:
    ids = prompt(120)
    alone = VirtualScheduler(flags_of(overlap=False, max_step_tokens=2048)).answer(ids, 24)
    worker = VirtualScheduler(flags_of(pages=256, overlap=overlap, mixed_chunk=mixed, max_step_tokens=step_tokens))
    answers = [worker.admit(rid_of(n), ids if n % 2 else prompt(60, seed=n), 24) for n in range(6)]
    worker.run()
    again = worker.answer(ids, 24)
    assert [a.ids for a in answers[1::2]] == [alone] * 3 and again == alone


@pytest.mark.parametrize("overlap", [True, False])
def test_the_simulated_executor_gives_the_same_tokens_after_retraction(overlap: bool) -> None:
    worker = VirtualScheduler(flags_of(new_token_ratio=0.01, overlap=overlap, queue_timeout=1000), pages=12)
    answers = [worker.admit(rid_of(n), prompt(30, seed=n), 100, stop_ids=[257]) for n in range(4)]
    worker.run()
    assert worker.scheduler.counters()["retractions_total"] > 0
    for n, answer in enumerate(answers):
        assert answer.end == "length" and answer.ids == VirtualScheduler().answer(prompt(30, seed=n), 100), n


OPTIONS = {
    "seed": {"temperature": 0.9, "seed": 7},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {65: 5.0, 66: -100.0}},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "grammar": {"grammar": m.Grammar(kind="regex", text="[a-m]{55,90}")},
    "min_tokens": {"min_tokens": 20},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_give_the_same_answer_with_overlap_in_a_batch_and_after_retraction(name: str) -> None:
    def ask(worker: FakeWorker, n: int):  # type: ignore[no-untyped-def]
        return worker.admit(rid_of(n), prompt(40, seed=n), 60, stop_ids=[5, 200], **OPTIONS[name])

    alone = []
    for n in range(4):
        worker = FakeWorker(overlap=False)
        alone.append(ask(worker, n))
        worker.run()
    crowded = FakeWorker(13, new_token_ratio=0.01, queue_timeout=1000)
    answers = [ask(crowded, n) for n in range(4)]
    crowded.run()
    crowded.assert_idle()
    assert crowded.book.totals.retractions > 0
    for one, other in zip(alone, answers, strict=True):
        assert (one.ids, one.end, one.logprobs, one.prompt_logprobs, one.completion_tokens) == (
            other.ids, other.end, other.logprobs, other.prompt_logprobs, other.completion_tokens,
        )  # fmt: skip


@pytest.mark.case("C85")
def test_an_abort_at_any_step_in_any_state_frees_everything_within_two_steps() -> None:
    """C85: cut while queued, in the middle of a chunked prompt, while decoding. Rule 5. Seen red with `end` that kept the row of a request
    whose step was out."""
    kinds = [{}, {"grammar": m.Grammar(kind="regex", text="[a-z]*")}, {"frequency_penalty": 1.0}, {"embed": "mean"}, {"prompt_logprobs": 0}]
    for at, kind in itertools.product(range(24), kinds):
        worker = FakeWorker(32, max_step_tokens=16, max_rows=2)
        keep = worker.admit(rid_of(1), prompt(20), 30)
        gone = worker.admit(rid_of(2), prompt(70, seed=2), 0 if "embed" in kind else 30, **kind)
        queued = worker.admit(rid_of(3), prompt(70, seed=3), 5)
        for _ in range(at):
            worker.scheduler.iterate()
        ended = gone.end is not None
        for rid in (2, 3, 3):
            worker.scheduler.handle(m.Abort(rid=rid_of(rid)))
        assert ended or gone.failed.code == "aborted"
        held = worker.book.memory.pages.count(2)
        for _ in range(2):
            worker.scheduler.iterate()
        assert worker.book.memory.pages.count(2) <= max(held, 4), "only the request that goes on holds pages"
        assert [r.admit.rid for r in worker.book.requests.values()] in ([rid_of(1)], [])
        worker.run()
        assert keep.ids == expected(prompt(20), 30) and queued.end is not None
        worker.assert_idle()


def test_equal_prompts_of_one_step_share_their_pages_from_then_on() -> None:
    """The second's own copies are freed when both have landed, while the next step is out. Seen red with arrays that went on from that step's."""
    worker = FakeWorker(max_step_tokens=128)
    ids = list(range(40))
    answers = [worker.admit(rid_of(n), ids, 30) for n in range(3)]
    worker.run()
    assert [a.ids for a in answers] == [expected(ids, 30)] * 3
    worker.assert_idle()


def test_two_steps_with_prompts_never_overlap_and_decode_steps_do() -> None:
    worker = FakeWorker(max_step_tokens=32)
    launched: list[tuple[bool, int]] = []
    launch = worker.scheduler._launch

    def spy() -> bool:
        out = worker.scheduler.outstanding
        if done := launch():
            launched.append((worker.scheduler._launched[-1].prefill, out))
        return done

    worker.scheduler._launch = spy  # type: ignore[method-assign]
    worker.admit(rid_of(1), prompt(100), 20)
    worker.admit(rid_of(2), prompt(100, seed=2), 20)
    worker.run()
    assert all(out == 0 for (prefill, out), (before, _) in zip(launched[1:], launched, strict=False) if prefill and before)
    assert sum(out == 1 for _, out in launched) > len(launched) // 2


def test_a_row_that_ends_by_length_is_left_out_of_the_step_behind_it() -> None:
    worker = FakeWorker()
    worker.admit(rid_of(1), prompt(20), 5)
    worker.run()
    assert worker.engine.steps == 5 and worker.scheduler.counters()["wasted_tokens_total"] == 0


def test_a_stop_id_costs_one_token_that_is_neither_sent_nor_counted() -> None:
    right = expected(prompt(20), 60)
    stop = right[30]
    worker = FakeWorker()
    answer = worker.admit(rid_of(1), prompt(20), 60, stop_ids=[stop])
    worker.run()
    at = right.index(stop)
    assert answer.ids == right[:at] and answer.completion_tokens == at + 1 and answer.stop_id == stop and answer.end == "stop"
    assert worker.scheduler.counters()["wasted_tokens_total"] == 1
    assert worker.scheduler.counters()["decode_tokens_total"] == at, "the first token came with the prompt"
    worker.assert_idle()
