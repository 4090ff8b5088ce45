"""The queue of services to look at: each once, never the same twice at a time, failed ones later and later.

A key that is added while it is worked on is worked on once more afterwards, so no event is lost and none is done twice at once.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Callable
from typing import Final

from fleet_operator.facts import Key

BACKOFF_BASE_S: Final = 0.5
BACKOFF_LIMIT_S: Final = 60.0


class WorkQueue:
    """For one event loop. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random) -> None:
        self._clock, self._jitter = clock, jitter
        self._due: dict[Key, float] = {}  # key → when; the heap may hold older entries of it
        self._heap: list[tuple[float, Key]] = []
        self._working: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: Key, *, after_s: float = 0.0) -> None:
        """Wants the key looked at after a while; an earlier wish stands."""
        at = self._clock() + after_s
        if key not in self._due or at < self._due[key]:
            self._due[key] = at
            heapq.heappush(self._heap, (at, key))
            self._changed.set()

    async def get(self) -> Key:
        """Waits for the next key that is due and not worked on; `done` or `failed` must follow."""
        while True:
            key, wait_s = self._next()
            if key is not None:
                return key
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                continue

    def _next(self) -> tuple[Key | None, float | None]:
        now, held = self._clock(), []
        try:
            while self._heap:
                at, key = self._heap[0]
                if self._due.get(key) != at:
                    heapq.heappop(self._heap)  # an older wish
                elif at > now:
                    return None, at - now
                elif key in self._working:
                    held.append(heapq.heappop(self._heap))
                else:
                    heapq.heappop(self._heap)
                    del self._due[key]
                    self._working.add(key)
                    return key, None
            return None, None
        finally:
            for entry in held:
                heapq.heappush(self._heap, entry)

    def done(self, key: Key, *, again_s: float | None = None) -> None:
        """The look went well; `again_s` seconds later the next one."""
        self._failures.pop(key, None)
        self._release(key, again_s)

    def failed(self, key: Key) -> float:
        """The look failed; returns the seconds until the next one: doubled each time, with jitter."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = min(BACKOFF_LIMIT_S, BACKOFF_BASE_S * float(2 ** min(count - 1, 20))) * (0.5 + self._jitter() / 2)
        self._release(key, wait_s)
        return wait_s

    def _release(self, key: Key, again_s: float | None) -> None:
        self._working.discard(key)
        self._changed.set()
        if again_s is not None:
            self.add(key, after_s=again_s)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._failures.pop(key, None)

    def __len__(self) -> int:
        return len(self._due)

    def check_integrity(self) -> None:
        """Every wish is in the heap; failures belong to no unbounded set."""
        entries = set(self._heap)
        assert all((at, key) in entries for key, at in self._due.items())
