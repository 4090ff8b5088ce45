"""Timers that need not be exact go off together: on multiples of their period, the same in all processes of a machine.

A process that has little to do wakes up less often then, and each time with more that is still in its caches. Times are of the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

LATE_S: Final = 0.5


def next_tick(now: float, period_s: float) -> float:
    """The multiple of a period that is nearest to one period from now: a timer that came a little early or late misses none and has none twice."""
    return (math.floor(now / period_s + 0.5) + 1) * period_s


def call_on_tick(loop: asyncio.AbstractEventLoop, period_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    """One call of a periodic timer."""
    return loop.call_at(next_tick(loop.time(), period_s), callback)


class Presence:
    """Whether this process was there, so that it may say who else is silent.

    One that was frozen, or stood in line for a CPU, finds its timers due before it has read what others sent meanwhile. Pure.
    """

    def __init__(self) -> None:
        self._was_late = False

    def is_sure(self, now: float, due: float) -> bool:
        """To be asked at each tick. False once, when it comes late: nobody's silence is to be judged now."""
        self._was_late = now - due > LATE_S and not self._was_late
        return not self._was_late


def not_before(at: float, step_s: float) -> float:
    """The first multiple of a step that is not before `at`."""
    return math.ceil(at / step_s) * step_s
