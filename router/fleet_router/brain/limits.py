"""Keeps the edges' shares of callers' limits (`decide.shares`): hears what is asked for, tells each edge its part when it changes.

On the brain's loop. `PeerExchange` tells other routers what is asked for here, and hears them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from fleet_router.decide.shares import ShareBook, Use, differs
from fleet_router.grid import call_on_tick
from fleet_router.messages import Shares

EVERY_S: Final = 1.0


class LimitKeeper:
    """See the module."""

    def __init__(self, edges: int, clock: Callable[[], float]) -> None:
        self.book = ShareBook(max(1, edges))
        self._clock = clock
        self._edges: dict[str, Callable[[Shares], None]] = {}
        self._sent: dict[str, tuple[float, dict[str, float]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def join(self, edge: str, send: Callable[[Shares], None]) -> None:
        """An edge that wants to know its shares."""
        self._edges[edge] = send
        self.book.join(edge)
        self.tell({})
        if self._timer is None:
            self._on_timer()

    def leave(self, edge: str) -> None:
        """It is gone; what it asked for does not count any more."""
        self._edges.pop(edge, None)
        self._sent.pop(edge, None)
        self.book.leave(edge)
        if not self._edges:
            self.close()

    def close(self) -> None:
        """Tells nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self, edge: str, uses: list[Use]) -> None:
        """An edge's report."""
        if edge in self._edges:
            self.tell(self.book.take(edge, uses, self._clock()))

    def tell(self, handed: dict[str, dict[str, float]]) -> None:
        """Those whose shares changed, or who are handed units. Smaller shares are told first."""
        share, by_edge = self.book.shares(self._clock())
        for edge in sorted(self._edges, key=lambda e: sum(by_edge[e].values())):
            new = (share, by_edge[edge])
            if edge in handed or differs(self._sent.get(edge), new):
                self._sent[edge] = new
                self._edges[edge](Shares(share, by_edge[edge], handed.get(edge, {})))

    def _on_timer(self) -> None:
        self._timer = call_on_tick(asyncio.get_running_loop(), EVERY_S, self._on_timer)
        self.tell({})
