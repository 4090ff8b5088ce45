"""What streams send to their clients in one turn of the event loop leaves together, at the turn's end.

When many tokens are read in a turn, and only then written, their clients' process is woken up once for all of them. One event loop owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Outbox:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def add(self, send: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """`send` is called before anything more is read."""
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append(send)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for send in waiting:
            send()
