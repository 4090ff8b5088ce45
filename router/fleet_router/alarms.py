"""Long time limits, of which nearly all are dropped before they are over: many share one timer of the loop, which looks at them a few times a second.

A limit goes off up to `LOOK_EVERY_S` late, never early; a short one has a timer of its own and is exact. One event loop owns it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

LOOK_EVERY_S: Final = 0.25
EXACT_BELOW_S: Final = 2.0  # a quarter of a second matters less to a longer one


class Alarm:
    """One limit at a time. Set and dropped by `Alarms`."""

    def __init__(self) -> None:
        self.due = math.inf  # loop time
        self.then: Callable[[], None] | None = None
        self.timer: asyncio.TimerHandle | None = None  # of a short one


class Alarms:
    """See the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._set: dict[Alarm, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, alarm: Alarm, now: float, seconds: float, then: Callable[[], None]) -> None:
        """`then` is called when so many seconds are over, unless the alarm is set anew or dropped. Args: now: loop time."""
        if alarm.timer is not None:
            alarm.timer.cancel()
            alarm.timer = None
        alarm.then = then
        if seconds < EXACT_BELOW_S:
            self._forget(alarm)
            alarm.timer = self._loop.call_later(seconds, _go_off, alarm)
            return
        alarm.due = now + seconds
        self._set[alarm] = None
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def drop(self, alarm: Alarm) -> None:
        """Nothing is called. Again is nothing."""
        alarm.then = None
        if alarm.timer is not None:
            alarm.timer.cancel()
            alarm.timer = None
        else:
            self._forget(alarm)

    def _forget(self, alarm: Alarm) -> None:
        self._set.pop(alarm, None)
        alarm.due = math.inf

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        over = [alarm for alarm in self._set if alarm.due <= now]
        for alarm in over:
            if alarm.then is not None and alarm.due <= now:  # one that went off may have dropped it, or set it anew
                self._forget(alarm)
                _go_off(alarm)
        if self._set and self._timer is None:
            self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)


def _go_off(alarm: Alarm) -> None:
    then, alarm.then, alarm.timer = alarm.then, None, None
    if then is not None:
        then()
