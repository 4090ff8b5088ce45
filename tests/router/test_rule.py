"""The rule and the load it reads, as tables (R9, R10, R12-R14, R26, R42)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet_contract.worker import LoadReport, Profile, Seen
from fleet_router.decide.fleet import Fleet
from fleet_router.decide.load import LEARN_LIMIT, REPORT_LIFE_S, SILENT_FACTOR, Load, LoadTable, Pick, SlotLoad, Speed
from fleet_router.decide.rule import (
    DELTA,
    DELTA_MIXED,
    FEW,
    Ask,
    Chosen,
    FewTerms,
    Hits,
    Member,
    Pool,
    Terms,
    alone_terms,
    choose,
    decode_terms,
    delta,
    prefill_terms,
    tie_limit,
)
from fleet_router.revisions import choose_revision

ASK = Ask(prompt_tokens=1000, answer_tokens=100)


def speed(rate: float = 1000.0, capacity: int = 100_000, step: float = 0.01, per_row: float = 0.0) -> Speed:
    return Speed.of(Profile(prefill_tokens_per_s=rate, step_base_s=step, step_per_row_s=per_row), capacity)


def table(*speeds: Speed) -> LoadTable:
    out = LoadTable()
    for slot, one in enumerate(speeds):
        out.add(slot, one)
    return out


def load(on: LoadTable, slot: int, *, pend: int = 0, rows: int = 0, room: int = 0) -> None:
    """Requests of others: a report says so."""
    on.slots[slot].take_report(LoadReport(seq=(on.slots[slot].report_at and 2) or 1, pend=pend, run=rows, ctx=room), "r", 1.0)


def alone(n: int) -> Pool:
    return Pool(tuple(Member(slot, f"w{slot}", "unified") for slot in range(n)))


def hits(*tokens: int) -> Hits:
    return Hits(np.array([*tokens, *[0] * (16 - len(tokens))], float))


def first(n: int) -> int:
    return 0


def picked(on: LoadTable, pool: Pool, ask: Ask, found: Hits, draw: Any = first) -> Chosen:
    result = choose(on, pool, ask, found, draw)
    assert result is not None
    return result[0]


def legs_of(chosen: Chosen) -> tuple[int, int | None]:
    return chosen.serving, chosen.prefill


def total(terms: Terms) -> list[float]:
    return [float(t) for t in terms.total]


# -- the rule


@given(
    workers=st.lists(
        st.tuples(st.sampled_from([500.0, 1000.0, 1100.0, 4000.0]), st.integers(0, 5000), st.integers(0, 30), st.integers(0, 1500), st.booleans()),
        min_size=1, max_size=FEW,
    ),
    prompt=st.integers(1, 5000), answer=st.integers(1, 4000), host=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_choice_among_few_is_the_choice_among_many(workers: list[Any], prompt: int, answer: int, host: bool, seed: int) -> None:
    on = table(*(speed(rate, 6000, per_row=0.001) for rate, *_ in workers))
    for slot, (_, pend, rows, _, blamed) in enumerate(workers):
        load(on, slot, pend=pend, rows=rows, room=100 * rows)
        if blamed:
            on.slots[slot].set_penalty(1.0)
    held = hits(*(64 * (hit // 64) for *_, hit, _ in workers))
    if host:
        held = Hits(held.gpu, np.arange(16.0) * 64)
    pool, ask = alone(len(workers)), Ask(prompt, answer)
    few = choose(on, pool, ask, held, random.Random(seed).randrange)
    many = choose(on, pool, ask, held, random.Random(seed).randrange, np.ones(16, np.bool_))  # with open slots arrays are used
    assert few is not None and many is not None and isinstance(few[1], FewTerms) and not isinstance(many[1], FewTerms)
    assert legs_of(few[0]) == legs_of(many[0]) and few[0].cost_s == many[0].cost_s
    terms = few[1].as_terms()
    for name in ("slots", "wait", "work", "decode", "room", "penalty", "total"):
        assert np.array_equal(getattr(terms, name), getattr(many[1][0], name)), name


@pytest.mark.rule("R9")
def test_r9_a_long_hit_wins_on_a_worker_with_three_times_the_load_and_a_short_one_loses() -> None:
    on = table(speed(12_000.0, 3_000_000), speed(12_000.0, 3_000_000))
    load(on, 0, pend=30_000)
    load(on, 1, pend=10_000)
    ask = Ask(110_000, 100)
    assert picked(on, alone(2), ask, hits(100_000)).serving == 0
    assert picked(on, alone(2), ask, hits(500)).serving == 1


@pytest.mark.rule("R10")
def test_r10_doubling_a_worker_s_speed_halves_its_wait_and_work() -> None:
    on = table(speed(1000.0), speed(2000.0))
    for slot in (0, 1):
        load(on, slot, pend=500)
    terms = prefill_terms(on, np.array([0, 1]), ASK, hits())
    assert terms.wait[0] == pytest.approx(2 * terms.wait[1])
    assert terms.work[0] == pytest.approx(2 * terms.work[1])


def test_a_request_that_does_not_fit_the_kv_costs_room() -> None:
    on = table(speed(capacity=2000), speed(capacity=2000))
    load(on, 0, room=800)
    load(on, 1, room=1900)
    room = decode_terms(on, np.array([0, 1]), ASK).room
    assert room[0] == 0 and room[1] > 0


def test_a_full_cache_makes_a_miss_dearer() -> None:
    on = table(speed(capacity=2000), speed(capacity=2000))
    on.slots[1].set_cached(2000)
    work = prefill_terms(on, np.array([0, 1]), ASK, hits()).work
    assert work[1] == pytest.approx(5 * work[0])


def test_tokens_in_host_memory_are_cheaper_than_none_and_dearer_than_those_in_the_gpu() -> None:
    on = table(speed(), speed(), speed())
    found = hits(800)
    found.host = hits(0, 800).gpu
    work = prefill_terms(on, np.array([0, 1, 2]), ASK, found).work
    assert work[0] < work[1] < work[2]


@pytest.mark.rule("R13")
def test_r13_near_ties_are_broken_evenly() -> None:
    rng = random.Random(1)
    on = table(*[speed()] * 4)
    drawn = Counter(picked(on, alone(4), ASK, hits(), rng.randrange).serving for _ in range(10_000))
    assert sum((drawn[s] - 2500) ** 2 / 2500 for s in range(4)) < 16.3  # 3 degrees of freedom, p = 0.001


def test_among_near_ties_the_longest_hit_wins() -> None:
    on = table(*[speed(100_000)] * 3)
    assert picked(on, alone(3), Ask(100, 10), hits(0, 64, 0)).serving == 1


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 64), st.integers(0, 1000)), min_size=1, max_size=8), st.randoms())
def test_the_chosen_worker_is_never_worse_than_the_tie_window(loads: list[tuple[int, int, int]], rng: random.Random) -> None:
    on = table(*[speed()] * len(loads))
    for slot, (pend, rows, _) in enumerate(loads):
        load(on, slot, pend=pend, rows=rows)
    found = hits(*(h for _, _, h in loads))
    costs = total(alone_terms(on, np.arange(len(loads)), ASK, found))
    assert costs[picked(on, alone(len(loads)), ASK, found, rng.randrange).serving] <= tie_limit(min(costs))


@pytest.mark.rule("R12")
def test_r12_equal_prompts_in_one_turn_of_the_loop_spread_evenly() -> None:
    fleet = Fleet(random.Random(3).randrange)
    for slot in range(8):
        fleet.add_worker(slot, speed(12_000.0, 3_000_000), by_history=True)
    counts: Counter[int] = Counter()
    for n in range(200):
        keys = tuple(range(1000 * n, 1000 * n + 16))
        decision = fleet.decide(alone(8), Ask(1024, 100), keys, 0.0)
        assert decision is not None
        fleet.take(decision, keys, 0.0)
        counts[decision.chosen.serving] += 1
    assert max(counts.values()) <= 1.5 * 200 / 8


def test_a_hot_prefix_gets_a_second_copy_when_its_holder_is_behind() -> None:
    on = table(speed(12_000.0, 3_000_000), speed(12_000.0, 3_000_000))
    ask = Ask(10_000, 100)
    assert picked(on, alone(2), ask, hits(9_984)).serving == 0
    load(on, 0, pend=15_000)
    assert picked(on, alone(2), ask, hits(9_984)).serving == 1


def test_many_equal_prompts_spread_over_the_decodes_of_a_fast_model() -> None:
    """With steps of 2 ms all costs lie within 20 ms of each other; the one that holds the prefix must not get everything for that."""
    fast = speed(20_000.0, step=0.002, per_row=0.0001)
    on = table(fast, fast, fast)
    pool = Pool(prefill=(Member(0, "p", "prefill"),), decode=(Member(1, "d1", "decode"), Member(2, "d2", "decode")))
    rows: Counter[int] = Counter()
    for _ in range(32):
        chosen = picked(on, pool, Ask(100, 8), hits(0, 96, 0))
        rows[chosen.serving] += 1
        on.slots[chosen.serving].pick(0, 100, 108, 0.0)
    assert min(rows.values()) >= 10 and len(rows) == 2, rows


@pytest.mark.rule("R42")
def test_r42_paced_sessions_spread_over_idle_workers_and_come_back() -> None:
    fleet = Fleet(random.Random(5).randrange)
    for slot in (0, 1):
        fleet.add_worker(slot, speed(5_000.0, 200_000), by_history=True)
    served: Counter[int] = Counter()
    now = 0.0
    for session in range(50):
        home = None
        for turn in range(1, 4):
            keys = tuple(range(session * 1000, session * 1000 + 10 * turn))
            decision = fleet.decide(alone(2), Ask(640 * turn, 50), keys, now)
            assert decision is not None
            taken = fleet.take(decision, keys, now)
            fleet.first_token(taken, now + 0.2)
            fleet.release(taken)
            now += 10.0
            assert home in (None, decision.chosen.serving), "a later turn left its worker"
            home = decision.chosen.serving
        assert home is not None
        served[home] += 1
    assert max(served.values()) <= 0.65 * 50, served
    fleet.check_integrity()


# -- pairs


def pair_pool(**more: Any) -> Pool:
    return Pool(
        prefill=(Member(0, "p0", "prefill", "a"), Member(1, "p1", "prefill", "b")),
        decode=(Member(2, "d2", "decode", "a"), Member(3, "d3", "decode", "b")),
        **more,
    )


@pytest.mark.rule("R26")
def test_r26_a_pair_on_one_host_saves_the_transfer() -> None:
    on = table(*[speed(20_000.0, 1_000_000)] * 4)
    chosen = {legs_of(picked(on, pair_pool(), Ask(50_000, 10), hits(), random.Random(n).randrange)) for n in range(20)}
    assert chosen == {(2, 0), (3, 1)}


@pytest.mark.rule("R26")
def test_r26_the_transfer_is_weighed_against_the_load() -> None:
    on = table(*[speed(20_000.0, 1_000_000)] * 4)
    load(on, 0, pend=200_000)
    load(on, 3, rows=64, room=4_000_000)
    assert legs_of(picked(on, pair_pool(), Ask(50_000, 100), hits())) == (2, 1)


def test_workers_that_share_no_transfer_backend_never_pair() -> None:
    pool = Pool(
        prefill=(Member(0, "p0", "prefill", "a", ("tcp",)), Member(1, "p1", "prefill", "a", ("nixl",))),
        decode=(Member(2, "d2", "decode", "a", ("nixl",)),),
    )
    on = table(*[speed()] * 3)
    assert legs_of(picked(on, pool, ASK, hits(900))) == (2, 1)
    assert not Pool(prefill=pool.prefill[:1], decode=pool.decode).is_usable
    assert choose(on, Pool(prefill=pool.prefill[:1], decode=pool.decode), ASK, hits(), first) is None


def test_a_worker_that_can_do_all_takes_short_prompts_and_a_pair_long_ones() -> None:
    """The threshold is computed: here the decode also computes prompts, but has little to spare."""
    on = table(*[speed(20_000.0, 1_000_000)] * 4)
    load(on, 2, rows=20, room=40_000)
    load(on, 3, rows=20, room=40_000)
    pool = pair_pool(alone=(Member(2, "d2", "decode", "a"), Member(3, "d3", "decode", "b")))
    assert picked(on, pool, Ask(64, 10), hits()).prefill is None
    assert picked(on, pool, Ask(50_000, 10), hits()).prefill is not None
    assert picked(on, pool, Ask(50_000, 10), hits(0, 0, 49_984)).prefill is None


# -- learned speeds


def run_prompts(one: SlotLoad, seconds_per_token: float, n: int = 60, tokens: int = 2_000) -> None:
    now = 100.0
    for _ in range(n):
        pick = one.pick(tokens, tokens, tokens + 100, now)
        now += tokens * seconds_per_token
        one.start(pick, now)
        one.release(pick)


@pytest.mark.parametrize(("truth", "learned"), [(0.5, 0.5), (2.0, 2.0), (0.01, 1 / LEARN_LIMIT), (50.0, LEARN_LIMIT)])
@pytest.mark.rule("R14")
def test_r14_the_prefill_speed_is_learned_within_its_limits(truth: float, learned: float) -> None:
    on = table(speed(1000.0))
    run_prompts(on.slots[0], 1 / (1000.0 * truth), n=200)
    assert on.slots[0].prefill.factor == pytest.approx(learned, rel=0.1)
    on.check_integrity()


@pytest.mark.parametrize(("truth", "learned"), [(0.5, 0.5), (100.0, LEARN_LIMIT)])
@pytest.mark.rule("R14")
def test_r14_the_step_is_learned_too(truth: float, learned: float) -> None:
    on = table(speed(step=0.01))
    for _ in range(400):
        on.slots[0].learn_step(100 * 0.01 / truth, 100)
    assert on.slots[0].step.factor == pytest.approx(learned, rel=0.1)


def test_queueing_behind_others_is_no_slowness() -> None:
    on = table(speed(1000.0))
    picks = [on.slots[0].pick(1000, 1000, 1100, 0.0) for _ in range(20)]
    for n, pick in enumerate(picks, 1):
        on.slots[0].start(pick, float(n))
    assert on.slots[0].prefill.factor == pytest.approx(1.0)


def test_the_answer_weighs_more_where_speeds_differ() -> None:
    equal, mixed = table(speed(), speed()), table(speed(1000.0), speed(2000.0))
    slots = np.array([0, 1])
    assert (delta(equal, slots), delta(mixed, slots)) == (DELTA, DELTA_MIXED)


# -- load


@pytest.mark.rule("R12")
def test_r12_a_pick_counts_at_once_and_its_release_takes_it_back() -> None:
    book = table(speed()).slots[0]
    pick = book.pick(100, 120, 150, 0.0)
    assert book.now() == Load(pend=100, run=0, rows=1, ctx=0, committed=150)
    book.start(pick, 1.0)
    assert book.now() == Load(pend=0, run=1, rows=1, ctx=120, committed=150)
    book.release(pick)
    book.release(pick)
    assert book.now() == Load()


def test_a_pick_that_a_report_has_seen_is_counted_by_the_report_only() -> None:
    book = table(speed()).slots[0]
    for _ in range(3):
        book.pick(100, 120, 150, 0.0)
    book.take_report(LoadReport(seq=1, pend=200, run=0, seen={"r": Seen(up_to=2, missing=[1])}), "r", now=0.0)
    assert book.now() == Load(pend=300, run=0, rows=1, ctx=0, committed=350)


def test_reports_that_know_nothing_of_this_router_leave_its_picks_to_itself() -> None:
    book = table(speed()).slots[0]
    book.pick(100, 120, 150, 0.0)
    book.take_report(LoadReport(seq=1, pend=40, seen={"other": Seen(up_to=9)}), "r", now=0.0)
    assert book.now().pend == 140


def test_an_old_report_is_no_truth_any_more() -> None:
    on = table(speed())
    book = on.slots[0]
    book.pick(100, 120, 150, 0.0)
    book.take_report(LoadReport(seq=1, pend=9000, seen={"r": Seen(up_to=0)}), "r", now=0.0)
    on.tick(REPORT_LIFE_S - 0.1)
    assert book.now().pend == 9000
    on.tick(REPORT_LIFE_S + 0.1)
    assert book.now().pend == 100


def test_a_report_that_comes_late_is_ignored() -> None:
    book = table(speed()).slots[0]
    book.take_report(LoadReport(seq=5, pend=1), "r", now=0.0)
    book.take_report(LoadReport(seq=4, pend=999), "r", now=0.1)
    assert book.now().pend == 1


def test_a_prompt_whose_first_token_nobody_sees_is_not_waiting_for_ever() -> None:
    on = table(speed(1000.0, step=0.01))
    book = on.slots[0]
    pick = book.pick(1000, 1000, 1100, 0.0)
    on.watch_silent(book, pick, 0.0)
    on.tick(1.0)
    assert book.now().pend == 1000
    on.tick(SILENT_FACTOR * 1.01 + 0.001)
    assert book.now() == Load(pend=0, run=1, rows=1, ctx=1000, committed=1100)


def test_a_removed_worker_s_requests_do_not_touch_the_next_one_in_its_slot() -> None:
    on = table(speed())
    old = on.slots[0]
    pick = old.pick(100, 120, 150, 0.0)
    on.remove(0)
    on.add(0, speed())
    old.start(pick, 1.0)
    old.release(pick)
    assert on.slots[0].now() == Load()
    on.check_integrity()


class LoadMachine(RuleBasedStateMachine):
    """The sums and the matrix are always what a recount says (R16: nothing leaks)."""

    def __init__(self) -> None:
        super().__init__()
        self.on = table(speed(), speed(3000.0))
        self.open: list[tuple[SlotLoad, Pick]] = []
        self.now, self.seq = 0.0, 0

    @rule(slot=st.integers(0, 1), pend=st.integers(0, 500), prompt=st.sampled_from([0, 500]))
    def pick(self, slot: int, pend: int, prompt: int) -> None:
        book = self.on.slots[slot]
        self.open.append((book, book.pick(pend, prompt, prompt + 50, self.now)))

    @rule(at=st.integers(0, 5), silent=st.booleans())
    def start(self, at: int, silent: bool) -> None:
        if self.open:
            book, pick = self.open[at % len(self.open)]
            if silent:
                self.on.watch_silent(book, pick, self.now)
            else:
                book.start(pick, self.now)

    @rule(at=st.integers(0, 5))
    def release(self, at: int) -> None:
        if self.open:
            book, pick = self.open.pop(at % len(self.open))
            book.release(pick)
            book.release(pick)

    @rule(slot=st.integers(0, 1), up_to=st.integers(-1, 9), missing=st.lists(st.integers(0, 9), max_size=3))
    def report(self, slot: int, up_to: int, missing: list[int]) -> None:
        self.seq += 1
        report = LoadReport(seq=self.seq, pend=10, run=2, ctx=30, kv_used=60, seen={"r": Seen(up_to=up_to, missing=missing)})
        self.on.slots[slot].take_report(report, "r", self.now)

    @rule(seconds=st.floats(0.01, 5.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.on.tick(self.now)

    @invariant()
    def adds_up(self) -> None:
        self.on.check_integrity()

    def teardown(self) -> None:
        for book, pick in self.open:
            book.release(pick)
        self.on.tick(self.now + 2 * REPORT_LIFE_S)
        assert all(book.now() == Load() for book in self.on.slots.values())


LoadMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLoadMachine: Any = LoadMachine.TestCase


# -- revisions


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
