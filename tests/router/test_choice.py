"""The rule and the load it reads, as tables."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_contract.worker import LoadReport, Profile, Seen
from fleet_router.choice import Ask, Candidate, Speed, choose, choose_revision, decode_terms, prefill_terms, unified_terms
from fleet_router.load import REPORT_LIFE_S, Load, LoadBook

ASK = Ask(prompt_tokens=1000, answer_tokens=100)


def speed(rate: float = 1000.0, capacity: int = 100_000) -> Speed:
    return Speed.of(Profile(prefill_tokens_per_s=rate, step_base_s=0.01), capacity)


def candidate(slot: int, *, hit: int = 0, rate: float = 1000.0, capacity: int = 100_000, **load: int) -> Candidate:
    return Candidate(slot, speed(rate, capacity), Load(**load), hit)


def first(n: int) -> int:
    return 0


def test_a_long_hit_wins_on_a_loaded_worker_and_a_short_one_loses() -> None:
    ask = Ask(10_000, 100)
    busy_long = unified_terms(candidate(0, hit=9_000, pend=6_000), ask)
    busy_short = unified_terms(candidate(0, hit=500, pend=6_000), ask)
    idle = unified_terms(candidate(1, pend=2_000), ask)
    assert choose([busy_long, idle], first).slot == 0
    assert choose([busy_short, idle], first).slot == 1


def test_doubling_a_worker_s_speed_halves_its_wait_and_work() -> None:
    slow, fast = (prefill_terms(candidate(0, rate=r, pend=500), ASK) for r in (1000.0, 2000.0))
    assert fast.wait == slow.wait / 2
    assert fast.work == slow.work / 2


def test_a_request_that_does_not_fit_the_kv_costs_room() -> None:
    fits = decode_terms(candidate(0, capacity=2000, kv_used=800), ASK)
    full = decode_terms(candidate(0, capacity=2000, kv_used=1900), ASK)
    assert fits.room == 0
    assert full.room > 0


def test_a_full_cache_makes_a_miss_dearer() -> None:
    empty = prefill_terms(candidate(0, capacity=2000), ASK)
    full = prefill_terms(candidate(0, capacity=2000, kv_used=2000), ASK)
    assert full.work == pytest.approx(5 * empty.work)


def test_near_ties_are_broken_evenly() -> None:
    rng = random.Random(1)
    terms = [unified_terms(candidate(slot), ASK) for slot in range(4)]
    drawn = Counter(choose(terms, rng.randrange).slot for _ in range(10_000))
    chi_square = sum((drawn[s] - 2500) ** 2 / 2500 for s in range(4))
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_among_near_ties_the_longest_hit_wins() -> None:
    ask = Ask(100, 10)
    terms = [unified_terms(candidate(slot, hit=hit, rate=100_000), ask) for slot, hit in enumerate((0, 64, 0))]
    assert choose(terms, first).slot == 1


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 64), st.integers(0, 1000)), min_size=1, max_size=8), st.randoms())
def test_the_chosen_worker_is_never_worse_than_the_tie_window(loads: list[tuple[int, int, int]], rng: random.Random) -> None:
    terms = [unified_terms(candidate(i, pend=p, run=r, hit=h), ASK) for i, (p, r, h) in enumerate(loads)]
    best = min(t.total for t in terms)
    assert choose(terms, rng.randrange).total <= best + min(0.02, 0.1 * best)


def test_many_equal_prompts_spread_over_the_decodes_of_a_fast_model() -> None:
    """With steps of 2 ms all costs lie within 20 ms of each other; the one that holds the prefix must not get everything for that."""
    fast = Speed.of(Profile(20_000.0, step_base_s=0.002, step_per_row_s=0.0001), 100_000)
    rows = [0, 0]
    for _ in range(32):
        holds = (Candidate(0, fast, Load(run=rows[0]), 96), Candidate(1, fast, Load(run=rows[1]), 0))
        terms = [decode_terms(c, Ask(100, 8)) for c in holds]
        rows[choose(terms, first).slot] += 1
    assert min(rows) >= 10, rows


@pytest.mark.parametrize(
    ("weights", "units", "allowed"),
    [
        ([("a", 100)], {"a": 1, "b": 3}, {"a"}),
        ([("a", 90), ("b", 10)], {"a": 1, "b": 1}, {"a", "b"}),
        ([("a", 0), ("b", 100)], {"a": 1, "b": 1}, {"b"}),
        ([("a", 100)], {"b": 1}, {"b"}),
        ([], {"a": 1, "b": 1}, {"a", "b"}),
        ([], {}, {None}),
        ([("a", 100)], {"a": 0}, {None}),
    ],
    ids=["weighted", "two", "zero weight", "the weighted one is not ready", "no weights", "nothing", "nothing ready"],
)
def test_a_revision_is_drawn_from_the_ready_ones(weights: list[tuple[str, int]], units: dict[str, int], allowed: set[str | None]) -> None:
    rng = random.Random(3)
    assert {choose_revision(weights, units, rng.randrange) for _ in range(200)} == allowed


def test_revisions_are_drawn_by_weight() -> None:
    rng = random.Random(5)
    drawn = Counter(choose_revision([("a", 75), ("b", 25)], {"a": 1, "b": 1}, rng.randrange) for _ in range(4000))
    assert 2850 < drawn["a"] < 3150


# -- load


def test_a_pick_counts_at_once_and_its_release_takes_it_back() -> None:
    book = LoadBook()
    pick = book.pick(100, 150)
    assert book.load(0.0) == Load(pend=100, run=1, ctx=0, kv_used=150)
    pick.started = True
    assert book.load(0.0) == Load(pend=0, run=1, ctx=150, kv_used=150)
    book.release(pick)
    book.release(pick)
    assert book.load(0.0) == Load()


def test_a_pick_that_a_report_has_seen_is_counted_by_the_report_only() -> None:
    book = LoadBook()
    for _ in range(3):
        book.pick(100, 150)
    book.take_report(LoadReport(seq=1, pend=200, run=0, kv_used=500, seen={"r": Seen(up_to=2, missing=[1])}), "r", now=0.0)
    assert book.load(0.0) == Load(pend=300, run=1, ctx=0, kv_used=650)


def test_reports_that_know_nothing_of_this_router_leave_its_picks_to_itself() -> None:
    book = LoadBook()
    book.pick(100, 150)
    book.take_report(LoadReport(seq=1, pend=40, seen={"other": Seen(up_to=9)}), "r", now=0.0)
    assert book.load(0.0).pend == 140


def test_an_old_report_is_no_truth_any_more() -> None:
    book = LoadBook()
    book.pick(100, 150)
    book.take_report(LoadReport(seq=1, pend=9000, seen={"r": Seen(up_to=0)}), "r", now=0.0)
    assert book.load(0.0).pend == 9000
    assert book.load(REPORT_LIFE_S + 0.1).pend == 100


def test_a_report_that_comes_late_is_ignored() -> None:
    book = LoadBook()
    book.take_report(LoadReport(seq=5, pend=1), "r", now=0.0)
    book.take_report(LoadReport(seq=4, pend=999), "r", now=0.1)
    assert book.load(0.1).pend == 1
