"""Which worker holds which prefix: one table of chain hashes for all workers, in history mode.

The brain enters a prompt's keys for the worker it picks, and forgets the oldest when a worker's KV capacity is full. No clock, no
I/O, no randomness. Only every fourth page and the last whole page are stored: at most 63 tokens of error for a quarter of the
memory. A slot is a small number that the caller gives to a worker for its life. (KV events will write the same table per slot:
`insert` and `forget` are their entry points.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fleet_contract.names import PAGE_SIZE

STRIDE: Final = 4  # pages between two stored keys
SHRINK: Final = 0.9  # the size follows what workers really had cached
GROW: Final = 1.02
MIN_SCALE: Final = 0.25


class _Slot:
    """Keys of one worker, oldest first, each with the tokens it stands for."""

    __slots__ = ("capacity_tokens", "held_tokens", "keys", "scale")

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.scale = 1.0
        self.held_tokens = 0
        self.keys: OrderedDict[int, int] = OrderedDict()

    @property
    def limit_tokens(self) -> int:
        return int(self.capacity_tokens * self.scale)


class PrefixIndex:
    """Prefix keys -> the slots that hold them. A prefix is named by its last page's chain hash."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # key -> bit mask of slots
        self._slots: dict[int, _Slot] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add_slot(self, slot: int, capacity_tokens: int) -> None:
        """Starts an empty history for a worker that can hold `capacity_tokens` of KV."""
        assert slot not in self._slots, f"slot {slot} is in use"
        self._slots[slot] = _Slot(capacity_tokens)

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker: it is gone or has restarted. Unknown slots are ignored."""
        gone = self._slots.pop(slot, None)
        if gone is not None:
            for key in gone.keys:
                self._clear(key, slot)

    def insert(self, slot: int, page_keys: Sequence[int]) -> None:
        """The worker will hold this prompt: its keys become the newest, the root newest of all, and the oldest leave.

        Args:
            slot: of a worker; a slot that was removed meanwhile is ignored.
            page_keys: chain hashes of all whole pages, in order.
        """
        entry = self._slots.get(slot)
        n = len(page_keys)
        if entry is None or n == 0:
            return
        keys, bit = entry.keys, 1 << slot
        depths = list(range(STRIDE, n + 1, STRIDE))
        if n % STRIDE:
            depths.append(n)
        for depth in reversed(depths):  # leaf first: the LRU end of a chain is its leaf
            key = page_keys[depth - 1]
            if key in keys:
                keys.move_to_end(key)
            else:
                tokens = PAGE_SIZE * (depth % STRIDE or STRIDE)
                keys[key] = tokens
                entry.held_tokens += tokens
                self._holders[key] = self._holders.get(key, 0) | bit
        self._evict(slot, entry)

    def forget(self, slot: int, page_keys: Sequence[int]) -> None:
        """The worker does not hold these prefixes."""
        entry = self._slots.get(slot)
        if entry is None:
            return
        for key in page_keys:
            tokens = entry.keys.pop(key, None)
            if tokens is not None:
                entry.held_tokens -= tokens
                self._clear(key, slot)

    def lookup(self, page_keys: Sequence[int]) -> dict[int, int]:
        """Tokens of the prompt that each slot holds; slots with none are absent.

        Along a chain the set of holders only shrinks, so the walk stops when it is empty. Where a worker leaves the set, its hit
        may still reach one of the next pages, if an earlier prompt ended there.
        """
        holders = self._holders
        hits: dict[int, int] = {}
        n = len(page_keys)
        mask = -1
        depth = 0
        while depth + STRIDE <= n:
            found = holders.get(page_keys[depth + STRIDE - 1], 0) & mask
            if found != mask:
                self._settle(page_keys, depth, self._used_mask() if mask == -1 else mask, found, hits)
                if not found:
                    return hits
            mask = found
            depth += STRIDE
        self._settle(page_keys, depth, self._used_mask() if mask == -1 else mask, 0, hits)
        return hits

    def feedback(self, slot: int, predicted_tokens: int, actual_tokens: int) -> None:
        """Corrects a worker's size by what it really had cached for one request."""
        entry = self._slots.get(slot)
        if entry is None:
            return
        if actual_tokens + STRIDE * PAGE_SIZE <= predicted_tokens:
            entry.scale = max(MIN_SCALE, entry.scale * SHRINK)
            self._evict(slot, entry)
        elif predicted_tokens:
            entry.scale = min(1.0, entry.scale * GROW)

    def held_tokens(self, slot: int) -> int:
        """Tokens that the stored keys of a slot stand for; 0 for unknown slots."""
        entry = self._slots.get(slot)
        return entry.held_tokens if entry is not None else 0

    def check_integrity(self) -> None:
        """Raises AssertionError when the two sides of the table disagree."""
        seen: dict[int, int] = {}
        for slot, entry in self._slots.items():
            assert entry.held_tokens == sum(entry.keys.values()), slot
            assert entry.held_tokens <= entry.limit_tokens, slot
            for key in entry.keys:
                seen[key] = seen.get(key, 0) | 1 << slot
        assert seen == self._holders

    def _used_mask(self) -> int:
        mask = 0
        for slot in self._slots:
            mask |= 1 << slot
        return mask

    def _settle(self, page_keys: Sequence[int], depth: int, before: int, after: int, hits: dict[int, int]) -> None:
        """Writes the hits of the slots that leave the set between `depth` and the next stored depth."""
        leaving = before & ~after
        for pages in range(depth + 1, min(depth + STRIDE, len(page_keys) + 1)):
            at = self._holders.get(page_keys[pages - 1], 0) & leaving
            if at:
                self._write(at, pages, hits)
        if depth:
            self._write(leaving, depth, hits)

    @staticmethod
    def _write(mask: int, pages: int, hits: dict[int, int]) -> None:
        while mask:
            low = mask & -mask
            slot = low.bit_length() - 1
            tokens = pages * PAGE_SIZE
            if hits.get(slot, 0) < tokens:
                hits[slot] = tokens
            mask ^= low

    def _evict(self, slot: int, entry: _Slot) -> None:
        limit = entry.limit_tokens
        while entry.held_tokens > limit:
            key, tokens = entry.keys.popitem(last=False)
            entry.held_tokens -= tokens
            self._clear(key, slot)

    def _clear(self, key: int, slot: int) -> None:
        left = self._holders[key] & ~(1 << slot)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
