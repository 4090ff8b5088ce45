"""What a prefill/decode pair must keep of a request's options: grammar, penalties, logprobs, and that legs are never retracted."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fleet_runtime import messages as m
from fleet_runtime.scheduler.request import State
from fleet_testing.fake_engine import expected
from fleet_testing.hand_over_harness import Pair, Workers
from fleet_testing.scheduler_harness import FakeWorker, rid_of


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
