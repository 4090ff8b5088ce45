"""The retry budget (R24) and the breaker (R25)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet_router.decide.retry import BUDGET_FLOOR, BUDGET_LIFE_S, BUDGET_SHARE, FAULTS_IN_ROW, MAX_OPEN_S, OPEN_S, Breaker, RetryBudget


@pytest.mark.rule("R24")
def test_r24_when_everything_fails_retries_are_a_tenth_of_the_requests() -> None:
    budget, retries, now = RetryBudget(), 0, 0.0
    for _ in range(20_000):
        now += 0.01
        budget.request(now)
        retries += budget.take(now)
    assert retries <= BUDGET_SHARE * 20_000 + BUDGET_FLOOR * (1 + now / BUDGET_LIFE_S)


def test_a_quiet_router_may_retry_a_few_times_and_again_later() -> None:
    budget = RetryBudget()
    assert sum(budget.take(0.0) for _ in range(50)) == int(BUDGET_FLOOR)
    assert not budget.take(0.0)
    assert sum(budget.take(BUDGET_LIFE_S) for _ in range(50)) == int(BUDGET_FLOOR)


def test_several_edges_may_retry_as_often_as_one_and_each_at_least_once() -> None:
    assert RetryBudget(64).take(0.0)
    for parts in (2, 5):
        budgets = [RetryBudget(parts) for _ in range(parts)]
        assert sum(b.take(0.0) for b in budgets for _ in range(50)) == int(BUDGET_FLOOR)


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=200))
@pytest.mark.rule("R24")
def test_r24_the_budget_is_never_overspent(steps: list[tuple[float, bool]]) -> None:
    budget, now, requests, retries = RetryBudget(), 0.0, 0, 0
    for wait, retry in steps:
        now += wait
        if retry:
            retries += budget.take(now)
        else:
            budget.request(now)
            requests += 1
    assert retries <= BUDGET_SHARE * requests + BUDGET_FLOOR * (1 + now / BUDGET_LIFE_S) + 1e-9


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAULTS_IN_ROW):
        breaker.fault(now)
    assert not breaker.allows(now)
    return breaker


@pytest.mark.rule("R25")
def test_r25_faults_in_a_row_open_it_and_one_success_between_does_not_let_them_add_up() -> None:
    breaker = Breaker()
    for _ in range(9):
        for _ in range(FAULTS_IN_ROW - 1):
            breaker.fault(0.0)
        breaker.success(30.0)
        breaker.success(30.0)
    assert breaker.allows(30.0)


@pytest.mark.rule("R25")
def test_r25_a_share_of_faults_opens_it() -> None:
    breaker = Breaker()
    for n in range(6):
        breaker.success(n * 0.1)
        breaker.fault(n * 0.1)
    assert not breaker.allows(0.6)


def test_faults_of_long_ago_do_not_count() -> None:
    breaker = Breaker()
    for n in range(9):
        breaker.fault(n * 30.0)
        breaker.success(n * 30.0)
    assert breaker.allows(300.0)


@pytest.mark.rule("R25")
def test_r25_half_open_admits_one_probe() -> None:
    breaker = opened()
    assert not breaker.allows(OPEN_S - 0.1)
    assert breaker.allows(OPEN_S)
    breaker.picked()
    assert not breaker.allows(OPEN_S + 100.0), "a second request while the probe is out"
    breaker.success(OPEN_S + 1.0)
    assert breaker.state == "closed" and breaker.allows(OPEN_S + 1.0)


@pytest.mark.rule("R25")
def test_r25_a_probe_that_says_nothing_lets_the_next_one_through() -> None:
    breaker = opened()
    assert breaker.allows(OPEN_S)
    breaker.picked()
    breaker.undecided()
    assert breaker.allows(OPEN_S)


def test_each_failed_probe_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(7):
        began = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - began)
        breaker.picked()
        breaker.fault(now)
    assert pauses == [2.0, 4.0, 8.0, 16.0, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S]


@pytest.mark.parametrize("state", ["closed", "open", "half-open"])
def test_asking_whether_it_allows_spends_nothing(state: str) -> None:
    breaker = Breaker() if state == "closed" else opened()
    now = OPEN_S if state == "half-open" else 0.0
    assert len({breaker.allows(now) for _ in range(5)}) == 1


class BreakerMachine(RuleBasedStateMachine):
    """At most one probe is out while it is not closed, and it always opens up again."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker, self.now, self.probes = Breaker(), 0.0, 0

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def request(self) -> None:
        if self.breaker.allows(self.now):
            half_open = self.breaker.state == "half-open"
            self.breaker.picked()
            self.probes += half_open

    @rule(ending=st.sampled_from(["success", "fault", "undecided"]))
    def answer(self, ending: str) -> None:
        if ending == "undecided":
            self.breaker.undecided()
        else:
            getattr(self.breaker, ending)(self.now)
        self.probes = 0

    @invariant()
    def one_probe(self) -> None:
        assert self.probes <= 1
        if self.breaker.state == "open":
            assert not self.breaker.allows(self.now) or self.breaker.state == "half-open"

    def teardown(self) -> None:
        self.breaker.undecided()
        assert self.breaker.allows(self.now + MAX_OPEN_S)


BreakerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestBreakerMachine: Any = BreakerMachine.TestCase
