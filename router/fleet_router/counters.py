"""Counters of one process life; `metrics` adds them up and writes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

from fleet_router.metrics import BUCKETS_S, Labels, Snapshot

SEEN_AT_ONCE: Final = 256  # on a request's way they are noted only


class Counters:
    """Counters of one process life."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Labels], float] = {}
        self._first_byte = [0] * (len(BUCKETS_S) + 1)
        self._first_byte_sum = 0.0
        self._seen: list[float] = []  # seconds that are in no bucket yet

    def add(self, name: str, amount: float = 1, labels: Labels = ()) -> None:
        """Adds to one counter. Args: labels: name and value of each, always in the same order."""
        key = (name, labels)
        self._values[key] = self._values.get(key, 0) + amount

    def observe_first_byte(self, seconds: float) -> None:
        """Time from the whole request to the first byte of its answer."""
        self._seen.append(seconds)
        if len(self._seen) >= SEEN_AT_ONCE:
            self._count_seen()

    def _count_seen(self) -> None:
        for seconds in self._seen:
            self._first_byte[bisect_left(BUCKETS_S, seconds)] += 1
            self._first_byte_sum += seconds
        self._seen.clear()

    def snapshot(self, gauges: Mapping[tuple[str, Labels], float]) -> Snapshot:
        """Everything, with the gauges that only the caller knows."""
        self._count_seen()
        return Snapshot(
            [(n, labels, v) for (n, labels), v in self._values.items()],
            [(n, labels, v) for (n, labels), v in gauges.items()],
            list(self._first_byte),
            self._first_byte_sum,
        )
