"""What a prefill/decode pair must keep of a request's options: grammar, penalties, logprobs, and that legs are never retracted."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from fleet_runtime import messages as m
from fleet_runtime.scheduler.request import State
from fleet_testing.fake_engine import expected
from fleet_testing.hand_over_harness import Pair, Workers, turn_once
from fleet_testing.scheduler_harness import Answer, FakeWorker, rid_of


def prompt(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


OPTIONS: dict[str, dict[str, object]] = {
    "nothing": {},
    "grammar": {"grammar": m.Grammar("regex", "[a-m]{25,40}")},
    "grammar after its first token": {"grammar": m.Grammar("regex", "x[a-m]{2}", expected(prompt(70), 1))},
    "penalties": {"frequency_penalty": 0.8, "repetition_penalty": 1.4},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "seed": {"temperature": 0.7, "seed": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_pair_answers_like_one_worker(workers: Workers, name: str) -> None:
    alone = FakeWorker()
    right = alone.admit(rid_of(1), prompt(70), 20, stop_ids=[257], **OPTIONS[name])
    alone.run()
    pair = Pair(workers("prefill", fake=True), workers("decode", fake=True))
    _, answer = pair.ask(rid_of(1), prompt(70), 20, stop_ids=[257], **OPTIONS[name])
    pair.turn_to_end(*pair_answers(pair))
    assert (answer.ids, answer.end, answer.logprobs, answer.prompt_logprobs) == (right.ids, right.end, right.logprobs, right.prompt_logprobs)
    pair.turn_to_idle()


def pair_answers(pair: Pair):  # type: ignore[no-untyped-def]
    return pair.prefill.inbox.of(rid_of(1)), pair.decode.inbox.of(rid_of(1))


def test_a_bad_grammar_fails_both_legs_with_the_reason(workers: Workers) -> None:
    pair = Pair(workers("prefill", fake=True), workers("decode", fake=True))
    first, second = pair.ask(rid_of(1), prompt(40), 5, grammar=m.Grammar("regex", "(a"))
    pair.turn_to_end(first, second)
    assert first.failed.code == second.failed.code == "invalid_grammar"
    pair.turn_to_idle()


@pytest.mark.parametrize("ended", ["prefill", "decode"])
@pytest.mark.parametrize("early", [False, True])
def test_a_leg_that_is_aborted_before_it_reached_its_room_ends_the_other(workers: Workers, ended: str, early: bool) -> None:
    """While its grammar compiles, or by an abort that came before it. Seen red: the other leg waited until it believed that none would come."""
    patient: dict[str, object] = {"other_leg_s": 60.0}
    pair = Pair(workers("prefill", fake=True, **patient), workers("decode", fake=True, **patient))
    mine, other = (pair.prefill, pair.decode) if ended == "prefill" else (pair.decode, pair.prefill)
    if early:
        mine.scheduler.handle(m.Abort(rid=rid_of(1)))
    else:
        mine.book.grammars._spawn = lambda job: None  # it compiles for ever
    pair.ask(rid_of(1), prompt(40), 5, grammar=m.Grammar("regex", "abc"))
    pair.turn(lambda: other.state(rid_of(1)) is not State.COMPILING, "the other leg has its grammar")
    if not early:
        mine.scheduler.handle(m.Abort(rid=rid_of(1)))
    pair.turn_to_end(*pair_answers(pair))
    assert mine.inbox.of(rid_of(1)).failed.code == "aborted"
    pair.turn_to_idle()


@pytest.mark.parametrize("seed", range(3))
def test_a_large_plain_request_gets_in_beside_hand_overs_that_never_pause(workers: Workers, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """On both of two unified workers that prefill for each other, so that neither waits for the other's. Seen red: it waited for its timeout."""
    monkeypatch.setattr("fleet_runtime.scheduler.admission.PATIENCE_S", 0.05)
    rng = random.Random(seed)
    flags: dict[str, object] = {"max_rows": rng.choice([4, 8]), "new_token_ratio": rng.choice([0.3, 1.0]), "queue_timeout": 1000}
    a, b = (workers("unified", pages=16, fake=True, flags=flags, other_leg_s=60.0) for _ in range(2))
    pairs, open_now, asked = (Pair(a, b), Pair(b, a)), list[tuple[int, list[Answer]]](), 0

    def turn(*, refill: bool = True) -> None:
        nonlocal asked
        open_now[:] = [(n, answers) for n, answers in open_now if any(x.end is None for x in answers)]
        while refill and len(open_now) < 8:
            asked += 1
            ids = prompt(rng.randint(20, 60), seed=asked)
            open_now.append((asked, list(pairs[asked % 2].ask(rid_of(asked), ids, rng.randint(2, 20), room=asked))))
        turn_once(a, b)

    for _ in range(300):
        turn()
    plain = [w.admit(rid_of(10_000 + n), prompt(100, seed=n), 80) for n, w in enumerate((a, b))]
    before, end = asked, time.monotonic() + 10
    while not all(x.end for x in plain):
        turn()
        assert time.monotonic() < end, f"{asked - before} pairs have passed it"
    assert [x.ids for x in plain] == [expected(prompt(100, seed=n), 80) for n in range(2)]
    while open_now:
        turn(refill=False)
        assert time.monotonic() < end + 10
    assert a.book.totals.failed == b.book.totals.failed == 0
    pairs[0].turn_to_idle()


def test_a_plain_request_enters_at_once_when_the_leg_that_kept_it_out_ends(workers: Workers) -> None:
    """Nothing runs, so no step looks again. Seen red: it waited until it was the elder."""
    worker = workers("unified", pages=16, fake=True, flags={"queue_timeout": 1000}, other_leg_s=60.0)
    leg, _ = Pair(worker, worker).ask(rid_of(1), prompt(40), 5, legs="p")
    worker.scheduler.iterate()
    plain = worker.admit(rid_of(2), prompt(100), 80)
    for _ in range(5):
        worker.scheduler.iterate()
    assert worker.state(rid_of(2)) is State.WAITING
    worker.scheduler.handle(m.Abort(rid=rid_of(1)))
    worker.scheduler.iterate()
    assert leg.failed.code == "aborted" and worker.state(rid_of(2)) is not State.WAITING
    worker.scheduler.handle(m.Abort(rid=rid_of(2)))
    while not worker.idle():
        worker.scheduler.iterate()
    assert plain.failed.code == "aborted"


def test_plain_requests_are_retracted_and_decode_legs_are_not(workers: Workers) -> None:
    """A unified worker with a pool that its plain requests outgrow, while it serves decode legs."""
    flags: dict[str, object] = {"new_token_ratio": 0.01, "queue_timeout": 1000}
    pair = Pair(workers("prefill", fake=True), workers("unified", pages=24, fake=True, flags=flags))
    plain = [pair.decode.admit(rid_of(10 + n), prompt(20, seed=n), 110, stop_ids=[999]) for n in range(3)]
    first, leg = pair.ask(rid_of(1), prompt(40), 60, stop_ids=[999])
    pair.turn_to_end(first, leg, *plain)
    assert leg.ids == expected(prompt(40), 60)
    assert [a.ids for a in plain] == [expected(prompt(20, seed=n), 110) for n in range(3)]
    assert pair.decode.book.totals.retractions > 0
    pair.turn_to_idle()
