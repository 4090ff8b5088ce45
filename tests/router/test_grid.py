"""Timers that go off together miss nothing and are never late by more than half a period."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.grid import LATE_S, Presence, next_tick, not_before


@given(st.floats(0, 1e7), st.sampled_from([0.05, 0.1, 0.25, 0.5, 1.0]), st.floats(-0.4, 0.4))
def test_ticks_follow_one_another_by_a_period_however_inexact_the_timer_is(now: float, period: float, off: float) -> None:
    first = next_tick(now, period)
    assert 0.5 * period - 1e-6 <= first - now <= 1.5 * period + 1e-6
    assert next_tick(first + off * period, period) == pytest.approx(first + period)


@given(st.floats(0, 1e7), st.sampled_from([0.25, 1.0]))
def test_a_pause_is_made_longer_by_less_than_a_step(at: float, step: float) -> None:
    assert 0 <= not_before(at, step) - at < step + 1e-6


def test_who_was_away_judges_nobody_until_it_has_looked_once() -> None:
    presence = Presence()
    sure = [presence.is_sure(due + late, due) for due, late in enumerate((0.0, 0.01, LATE_S / 2, 20.0, 0.0, 0.01))]
    assert sure == [True, True, True, False, True, True]


def test_who_is_late_all_the_time_judges_every_second_time() -> None:
    presence = Presence()
    assert [presence.is_sure(due + 10.0, due) for due in range(6)] == [False, True] * 3
