"""Rows: the numbers of the executor's relay slots, and who drew there last. The one owner of both.

A slot keeps the token that its row drew last, so that a step can be queued before that token is known. `relay` gives the reference that
stands for it; it refuses one that its own request has not drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleet_runtime.scheduler.request import Request


class Rows:
    """`count` slots. Called by the book (take, give) and the loop (drawn, relay)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._drawn_by: list[Request | None] = [None] * count

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def take(self, request: Request) -> None:
        """Gives a request its slot; the caller has made sure that one is free."""
        assert request.slot < 0, "a request has one row"
        request.slot = self._free.pop()
        self._drawn_by[request.slot] = None

    def give(self, request: Request) -> None:
        """Takes the slot back. A launched step may still write to it: steps run in order, so the next owner's come later."""
        self._drawn_by[request.slot] = None
        self._free.append(request.slot)
        request.slot = -1

    def drawn(self, request: Request) -> None:
        """A step that draws for this request is launched."""
        self._drawn_by[request.slot] = request

    def relay(self, request: Request) -> int:
        """What stands in a step's token ids for the token that this request drew last."""
        assert self._drawn_by[request.slot] is request, "a row is read before it was drawn"
        return -1 - request.slot

    def rebuild(self, holders: Iterable[Request]) -> None:
        """Makes the free slots anew, for the self-check. Nothing is launched then."""
        held = {r.slot for r in holders}
        self._free = [n for n in range(self.count - 1, -1, -1) if n not in held]
        self._drawn_by = [None] * self.count

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Each slot is free, or of one request."""
        held = [r.slot for r in holders]
        assert sorted([*held, *self._free]) == list(range(self.count)), "a row is lost, or has two owners"
        assert all(r is None or r.slot == slot for slot, r in enumerate(self._drawn_by))
