"""Shared time limits go off as if each had a timer of its own, at most a look late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.alarms import EXACT_BELOW_S, LOOK_EVERY_S, Alarm, Alarms


class Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """A loop's clock and timers."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> Timer:
        self.timers.append(Timer(self.now + seconds, lambda: call(*args)))
        return self.timers[-1]

    def run_until(self, end: float) -> None:
        while due := [t for t in self.timers if not t.cancelled and t.at <= end]:
            timer = min(due, key=lambda t: t.at)
            self.timers.remove(timer)
            self.now = max(self.now, timer.at)
            timer.call()
        self.now = end
        self.timers = [t for t in self.timers if not t.cancelled]


seconds = st.one_of(st.floats(0.01, 1.9), st.floats(2.0, 8.0))
ops = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 3), seconds),
        st.tuples(st.just("chain"), st.integers(0, 3), seconds, seconds),  # one that goes off sets itself anew
        st.tuples(st.just("kill"), st.integers(0, 3), seconds),  # one that goes off drops another
        st.tuples(st.just("drop"), st.integers(0, 3)),
        st.tuples(st.just("wait"), st.floats(0.01, 3.0)),
    ),
    max_size=30,
)


@given(ops)
def test_alarms_go_off_as_timers_of_their_own_would_a_look_late_at_most(ops: list[Any]) -> None:
    loop = Loop()
    alarms, all_alarms = Alarms(cast(asyncio.AbstractEventLoop, loop)), [Alarm() for _ in range(4)]
    due: dict[int, tuple[float, float]] = {}  # earliest and latest time of each that is set

    def put(n: int, s: float, more: Callable[[], None] = lambda: None) -> None:
        late = LOOK_EVERY_S if s >= EXACT_BELOW_S else 0.0
        due[n] = loop.now + s, loop.now + s + late

        def off() -> None:
            first, last = due.pop(n)
            assert first - 1e-9 <= loop.now <= last + 1e-9
            more()

        alarms.set(all_alarms[n], s, off)

    def kill(n: int) -> None:
        due.pop(n, None)
        alarms.drop(all_alarms[n])

    for op in ops:
        if op[0] == "set":
            put(op[1], op[2])
        elif op[0] == "chain":
            put(op[1], op[2], lambda op=op: put(op[1], op[3]))  # type: ignore[misc]
        elif op[0] == "kill":
            put(op[1], op[2], lambda op=op: kill((op[1] + 1) % 4))  # type: ignore[misc]
        elif op[0] == "drop":
            kill(op[1])
        else:
            loop.run_until(loop.now + op[1])
        assert all(last >= loop.now - 1e-9 for _, last in due.values()), "one did not go off"
    loop.run_until(loop.now + 20)
    assert not due
    assert not loop.timers, "nothing is set, and nothing wakes the process up"


def test_one_that_raises_leaves_the_others_to_the_next_look() -> None:
    loop, off = Loop(), []
    alarms = Alarms(cast(asyncio.AbstractEventLoop, loop))
    for then in (lambda: 1 // 0, lambda: off.append(1)):
        alarms.set(Alarm(), 5.0, then)
    with pytest.raises(ZeroDivisionError):
        loop.run_until(loop.now + 10)
    loop.run_until(loop.now + 10)
    assert off == [1] and not loop.timers
