"""Applies KV events to the index: finds each block's place by its parent, computes own keys from its tokens, keeps orphans for a while.

The reader of the event sockets calls it, one event at a time and after it has checked the stream's sequence; engine hashes come as
unsigned 64-bit numbers. An event that cannot be used costs only itself: the answer says why, for a counter. Clock-free: `now` is passed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from fleet_contract.names import PAGE_SIZE
from fleet_contract.prefix import chain_hashes
from fleet_router.decide.index import PrefixIndex, StoreResult
from fleet_router.decide.keys import STRIDE

MAX_WAITING: Final = 1_000  # events per worker whose parent is unknown
WAITING_LIFE_S: Final = 30.0

STORED: Final = StoreResult.STORED
OVERFLOW: Final = StoreResult.OVERFLOW
WAITING: Final = "waiting"  # its parent is unknown yet
UNKNOWN: Final = "unknown"  # a copy without tokens of blocks that nobody told of
MALFORMED: Final = "malformed"  # tokens and hashes do not fit each other
UNSUPPORTED: Final = "unsupported"  # engine blocks that are no multiple of 16 tokens
DROPPED: Final = "dropped"  # the waiting table is full, or the worker is gone


class Stored(NamedTuple):
    """A run of engine blocks, in prefix order.

    `chains` are own chain keys of every page, for engines that send them; then tokens are not needed. Without tokens and chains it is
    a copy between tiers: the hashes themselves are known already.
    """

    tier: int
    group: int
    hashes: Sequence[int]
    parent: int | None
    block_size: int
    namespace: int
    token_ids: Sequence[int] = ()
    chains: Sequence[int] = ()


class EventBook:
    """Events of all workers on their way into one index."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._waiting: dict[int, OrderedDict[int, list[tuple[float, Stored]]]] = {}  # slot -> parent -> events

    def store(self, slot: int, event: Stored, now: float) -> str:
        """Applies one event, and those that waited for its blocks."""
        outcome = self._apply(slot, event, now)
        if outcome == STORED and slot in self._waiting:
            ready: deque[int] = deque(event.hashes)
            while ready:
                for _, child in self._waiting[slot].pop(ready.popleft(), ()):
                    if self._apply(slot, child, now) == STORED:
                        ready.extend(child.hashes)
            if not self._waiting[slot]:
                del self._waiting[slot]
        return outcome

    def remove(self, slot: int, tier: int, group: int, hashes: Sequence[int]) -> int:
        """Takes blocks back; returns how many were known."""
        return sum(self._index.remove(slot, tier, group, h) for h in hashes)

    def clear(self, slot: int) -> None:
        """The worker dropped everything, as far as its events have been written."""
        self._waiting.pop(slot, None)
        self._index.clear_written(slot)

    def forget(self, slot: int) -> None:
        """The slot is no more: its orphans go."""
        self._waiting.pop(slot, None)

    def waiting(self, slot: int) -> int:
        """Events that wait for their parent."""
        return sum(len(events) for events in self._waiting.get(slot, {}).values())

    def expire(self, now: float) -> int:
        """Drops events that waited too long; returns how many."""
        dropped = 0
        for slot, parents in list(self._waiting.items()):
            for parent, events in list(parents.items()):
                fresh = [e for e in events if now - e[0] < WAITING_LIFE_S]
                dropped += len(events) - len(fresh)
                if fresh:
                    parents[parent] = fresh
                else:
                    del parents[parent]
            if not parents:
                del self._waiting[slot]
        return dropped

    def _apply(self, slot: int, event: Stored, now: float) -> str:
        if event.block_size <= 0 or event.block_size % PAGE_SIZE:
            return UNSUPPORTED
        pages = event.block_size // PAGE_SIZE
        if not event.token_ids and not event.chains:
            return self._copy(slot, event)
        if event.chains and len(event.chains) != len(event.hashes) * pages:
            return MALFORMED
        if not event.chains and len(event.token_ids) != len(event.hashes) * event.block_size:
            return MALFORMED
        chain, depth = event.namespace, 0
        if event.parent is not None:
            place = self._index.resolve(slot, event.parent)
            if place is None:
                return self._wait(slot, event, now)
            chain, depth = place
        chains = event.chains or chain_hashes(event.token_ids, chain)
        for n, engine_hash in enumerate(event.hashes):
            mine = chains[n * pages : (n + 1) * pages]
            first = depth + n * pages + 1  # depth of the first of these pages
            inner = [key for at, key in enumerate(mine[:-1], first) if at % STRIDE == 0] if pages > 1 else ()
            outcome = self._index.store(slot, event.tier, event.group, engine_hash, mine[-1], first + pages - 1, inner)
            if outcome == StoreResult.OVERFLOW:
                return OVERFLOW
            if outcome == StoreResult.UNKNOWN_SLOT:
                return DROPPED
        return STORED

    def _copy(self, slot: int, event: Stored) -> str:
        """Blocks that another tier has told of already."""
        known = 0
        for engine_hash in event.hashes:
            place = self._index.resolve(slot, engine_hash)
            if place is not None:
                inner = self._index.inner_keys(slot, engine_hash)
                if self._index.store(slot, event.tier, event.group, engine_hash, *place, inner) == StoreResult.OVERFLOW:
                    return OVERFLOW
                known += 1
        return STORED if known == len(event.hashes) else UNKNOWN

    def _wait(self, slot: int, event: Stored, now: float) -> str:
        assert event.parent is not None
        if self.waiting(slot) >= MAX_WAITING:
            return DROPPED
        self._waiting.setdefault(slot, OrderedDict()).setdefault(event.parent, []).append((now, event))
        return WAITING
