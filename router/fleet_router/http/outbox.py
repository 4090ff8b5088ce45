"""What an edge writes in one turn of the event loop, to clients and to workers, leaves together when the turn is over.

When all that came is read first, and only then written, the processes at the other ends are woken up once for many writes. One event loop
owns it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Outbox:
    """See the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Callable[[], None]] = []

    def add(self, send: Callable[[], None]) -> None:
        """`send` is called once this turn is over, before the next one reads."""
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting.append(send)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for send in waiting:
            try:
                send()
            except Exception:  # the border between connections: one that cannot be written to takes no other's bytes with it
                log.exception("what was to be sent could not be")
