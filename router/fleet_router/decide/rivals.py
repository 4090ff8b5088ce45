"""What waits at the other routers in front of the same workers, so that the queues of all of them are served nearly like one.

Each router tells of every worker the best of its waiting requests that would go there, were the worker open: a *wish*. The order of waiting
requests (`queue`) means the same everywhere. A router that finds a worker open, but knows of a better wish that fits there, leaves it to
the other, for PATIENCE_S: that is longer than news takes both ways, and far shorter than the work that waits at an open worker. So nothing
is lost when a wish is out of date, or its router is gone.

Pure. Levels: an order falls by the same amount with age for all requests, so it is kept as its value at time 0 of our clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fleet_router.decide.load import CAPACITY, COMMITTED, ROWS

PATIENCE_S: Final = 0.025
MAX_WISHES: Final = 16  # that a router tells

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]


class Wish(NamedTuple):
    """The best request that waits for a worker."""

    level: float  # the least goes first
    tokens: int  # of the worker's cache, with its answer
    keeps: bool = False  # it fits nowhere for long: the worker is kept for it until it fits


Wishes = tuple[Wish, ...]  # of one router for one worker: the best of all, of those that need less room, ...; best first


class Rivals:
    """See the module."""

    def __init__(self, age_weight: float = 0.02) -> None:
        self.age_weight = age_weight
        self.on_changed: Callable[[], None] = lambda: None
        self.ours: dict[int, Wishes] = {}  # by slot, as they were told last or are to be told now
        self.changed = False
        self._theirs: dict[str, dict[int, Wishes]] = {}  # by router
        self._deferred: dict[int, float] = {}  # by slot: since when we leave it to others
        self._looked_at = -math.inf

    # -- ours

    def set_ours(self, slots: Ints, wishes: Mapping[int, Wishes]) -> bool:
        """What waits here for the workers of one pool. Returns whether others are to be told."""
        old = {slot: wish for slot in slots.tolist() if (wish := self.ours.get(slot)) is not None}
        if old == wishes:
            return False
        for slot in old:
            del self.ours[slot]
        self.ours.update(wishes)
        self.changed = True
        self.on_changed()
        return True

    def take_changed(self) -> bool:
        """Whether ours changed since the last call."""
        was, self.changed = self.changed, False
        return was

    def told(self) -> dict[int, Wishes]:
        """The best of ours."""
        if len(self.ours) <= MAX_WISHES:
            return self.ours
        return dict(sorted(self.ours.items(), key=lambda item: item[1][0].level)[:MAX_WISHES])

    # -- theirs

    def set_theirs(self, router: str, wishes: dict[int, Wishes]) -> None:
        """All wishes of another router."""
        if wishes:
            self._theirs[router] = wishes
        else:
            self._theirs.pop(router, None)

    def wait_for(self, slots: Ints) -> bool:
        """Requests wait at other routers for some of these workers."""
        return bool(self._theirs) and any(slot in wishes for wishes in self._theirs.values() for slot in slots.tolist())

    @property
    def any(self) -> bool:
        """Requests wait at other routers."""
        return bool(self._theirs)

    def leave(self, slots: Ints, m: Floats, levels: Floats, wanted: Bools, now: float) -> Bools:
        """Of the workers that each of our requests may go to, those that no better wish of others is for.

        Args:
            m: columns of the load matrix of these slots.
            levels, wanted: [request, worker].
        """
        best = np.full(slots.size, math.inf)
        for at, slot in enumerate(slots.tolist()):
            room = m[CAPACITY, at] - m[COMMITTED, at] if m[ROWS, at] > 0 else math.inf
            for wishes in self._theirs.values():
                level = next((wish.level for wish in wishes.get(slot, ()) if wish.tokens <= room), math.inf)
                best[at] = min(best[at], level)
        others_first: Bools = wanted & (levels > best)
        contested: list[bool] = np.any(others_first, axis=0).tolist()
        for at, slot in enumerate(slots.tolist()):
            if not contested[at]:
                self._deferred.pop(slot, None)
            elif self._deferred.setdefault(slot, now) + PATIENCE_S <= now:
                others_first[:, at] = False
        return wanted & ~others_first

    def kept(self, slots: Ints, own_level: float) -> Ints:
        """Positions of workers that others keep for a request that comes before ours at `own_level` (infinite: we keep none)."""
        return np.array(
            [
                at
                for at, slot in enumerate(slots.tolist())
                if any(w.keeps and w.level < own_level for wishes in self._theirs.values() for w in wishes.get(slot, ()))
            ],
            np.intp,
        )  # fmt: skip

    def look(self, now: float) -> None:
        """The queues are looked at."""
        self._looked_at = now
        if not self._theirs:
            self._deferred.clear()

    def idle(self, slots: Ints) -> None:
        """Nothing waits here for the workers of one pool."""
        self.set_ours(slots, {})
        for slot in slots.tolist():
            self._deferred.pop(slot, None)

    def took(self, slot: int) -> None:
        """We sent a request there."""
        self._deferred.pop(slot, None)

    @property
    def look_again_at(self) -> float:
        """When our patience with somebody ends; infinite when we wait for nobody."""
        ends = [since + PATIENCE_S for since in self._deferred.values()]
        return min((end for end in ends if end > self._looked_at), default=math.inf)
