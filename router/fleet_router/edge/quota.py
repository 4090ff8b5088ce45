"""An edge's reports of what its callers asked for: each second, and soon after a bucket has run low. The brain answers with shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from fleet_router.decide.shares import Use
from fleet_router.edge.callers import Callers
from fleet_router.grid import call_on_tick
from fleet_router.messages import Shares

EVERY_S: Final = 1.0
SOON_S: Final = 0.02


class QuotaReports:
    """`send(uses)` tells the brain; its answer comes to `take`."""

    def __init__(self, callers: Callers, send: Callable[[list[Use]], None]) -> None:
        self._callers = callers
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        callers.on_low = self._soon

    def start(self) -> None:
        """Reports from now on."""
        self._timer = call_on_tick(self._loop, EVERY_S, self._report)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self, shares: Shares) -> None:
        """What we may give from now on."""
        if self._callers.set_shares(shares.share, shares.shares, shares.handed):
            self._soon()

    def _soon(self) -> None:
        if self._timer is not None and self._timer.when() > self._loop.time() + SOON_S:
            self._timer.cancel()
            self._timer = self._loop.call_later(SOON_S, self._report)

    def _report(self) -> None:
        self._timer = call_on_tick(self._loop, EVERY_S, self._report)
        if uses := self._callers.uses():
            self._send(uses)
