"""The batches that can be sent again: bounded in number, bytes and messages. Pure; the publisher's thread owns it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile
from typing import Final

MAX_BYTES: Final = 64 << 20
MAX_BEATS: Final = 100_000  # heartbeats kept in all; more than a day without any change


@dataclass(frozen=True, slots=True)
class Kept:
    """Messages of equal payload under consecutive sequences: one batch, or heartbeats of a quiet time."""

    first: int
    count: int
    payload: bytes
    beat: bool

    def messages(self, start: int) -> Iterator[tuple[int, bytes]]:
        """(sequence, payload) from `start` on."""
        return ((sequence, self.payload) for sequence in range(max(start, self.first), self.first + self.count))


class ReplayBuffer:
    """Takes every message that was published, in order.

    Heartbeats between two batches are kept as one: they must be there (a replay without gaps is what readers accept), but an idle worker's
    history must not be driven out by them.
    """

    def __init__(self, max_batches: int, max_bytes: int = MAX_BYTES, max_beats: int = MAX_BEATS) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._max_beats = max_beats
        self._kept: deque[Kept] = deque()
        self._batches = self._bytes = self._beats = 0

    def add(self, sequence: int, payload: bytes, *, beat: bool = False) -> None:
        """Keeps a message and drops the oldest that no longer fit."""
        assert not self._kept or sequence == self._kept[-1].first + self._kept[-1].count, "sequences are consecutive"
        if beat and self._kept and (last := self._kept[-1]).beat:
            self._kept[-1] = Kept(last.first, last.count + 1, last.payload, True)
        else:
            self._kept.append(Kept(sequence, 1, payload, beat))
            self._bytes += len(payload)
        self._batches += not beat
        self._beats += beat
        while self._over() and (len(self._kept) > 1 or beat):
            self._drop_oldest()

    def _over(self) -> bool:
        return self._batches > self._max_batches or self._bytes > self._max_bytes or self._beats > self._max_beats

    def _drop_oldest(self) -> None:
        oldest = self._kept[0]
        if oldest.beat and len(self._kept) == 1:
            self._kept[0] = Kept(oldest.first + 1, oldest.count - 1, oldest.payload, True)
            self._beats -= 1
            return
        self._kept.popleft()
        self._bytes -= len(oldest.payload)
        if oldest.beat:
            self._beats -= oldest.count
        else:
            self._batches -= 1

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """(sequence, payload) of all that is kept now from `start` on, whatever is added or dropped meanwhile."""
        kept = list(dropwhile(lambda k: k.first + k.count <= start, self._kept))
        return (message for k in kept for message in k.messages(start))

    def check_integrity(self) -> None:
        """Counts equal what is kept; sequences are consecutive. O(kept)."""
        assert self._batches == sum(not k.beat for k in self._kept) and self._beats == sum(k.count for k in self._kept if k.beat)
        assert self._bytes == sum(len(k.payload) for k in self._kept)
        sequences = [sequence for sequence, _ in self.since(0)]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences))) if sequences else not self._kept
