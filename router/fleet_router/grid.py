"""Timers that need not be exact go off together: on multiples of their period, the same in all processes of a machine.

A process that has little to do wakes up less often then, and each time with more that is still in its caches. Times are of the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


def next_tick(now: float, period_s: float) -> float:
    """The multiple of a period that is nearest to one period from now: a timer that came a little early or late misses none and has none twice."""
    return (math.floor(now / period_s + 0.5) + 1) * period_s


def call_on_tick(loop: asyncio.AbstractEventLoop, period_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    """One call of a periodic timer."""
    return loop.call_at(next_tick(loop.time(), period_s), callback)


def not_before(at: float, step_s: float) -> float:
    """The first multiple of a step that is not before `at`."""
    return math.ceil(at / step_s) * step_s
