"""Long time limits, of which nearly all are dropped before they are over: many share one timer of the loop, which looks at them a few times a second.

A limit goes off up to `LOOK_EVERY_S` late, never early; a short one has a timer of its own and is exact. One event loop owns it. Timers
that come again and again are for `grid`.
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
        self.due = math.inf  # loop time, of a long one
        self.then: Callable[[], None] | None = None
        self.timer: asyncio.TimerHandle | None = None  # of a short one


class Alarms:
    """See the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._long: dict[Alarm, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, alarm: Alarm, after_s: float, then: Callable[[], None]) -> None:
        """`then` is called when so many seconds are over, unless the alarm is set anew or dropped."""
        _stop_timer(alarm)
        alarm.then = then
        if after_s < EXACT_BELOW_S:
            self._forget(alarm)
            alarm.timer = self._loop.call_later(after_s, _go_off, alarm)
            return
        alarm.due = self._loop.time() + after_s
        self._long[alarm] = None
        self._keep_looking()

    def drop(self, alarm: Alarm) -> None:
        """Nothing is called. Again is nothing."""
        _stop_timer(alarm)
        alarm.then = None
        self._forget(alarm)

    def _forget(self, alarm: Alarm) -> None:
        self._long.pop(alarm, None)
        alarm.due = math.inf

    def _keep_looking(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        over = [a for a in self._long if a.due <= now]
        if self._long:
            self._keep_looking()  # first: one that raises leaves the others to the next look
        for alarm in over:
            if alarm.due <= now:  # one that went off may have dropped this one, or set it anew
                self._forget(alarm)
                _go_off(alarm)


def _stop_timer(alarm: Alarm) -> None:
    if alarm.timer is not None:
        alarm.timer.cancel()
        alarm.timer = None


def _go_off(alarm: Alarm) -> None:
    then, alarm.then, alarm.timer = alarm.then, None, None
    if then is not None:
        then()
