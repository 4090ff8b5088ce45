"""What one worker probably holds, judged from the prompts sent to it: a least-recently-used cache of blocks, leaf first.

Used by `index` for workers whose engine tells no KV events, or whose event stream cannot be trusted, and for all keys of bytes. Because
a block can only leave after the blocks behind it, only leaves need a place in the order of use: a prompt that is known already costs
one stamp, however long it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final

SHRINK: Final = 0.9  # the size follows what the worker really had cached
GROW: Final = 1.02
MIN_SCALE: Final = 0.25
_SLACK: Final = 64  # outdated entries that the heap may hold beside as many as there are leaves


class History:
    """Blocks of one worker. `hold(key)` and `drop(key)` are told of each block that comes and goes."""

    __slots__ = ("_branches", "_clock", "_drop", "_heap", "_hold", "_leaves", "_parent", "_touched", "capacity_blocks", "scale")

    def __init__(self, capacity_blocks: int, hold: Callable[[int], None], drop: Callable[[int], None]) -> None:
        self.capacity_blocks = capacity_blocks
        self.scale = 1.0
        self._hold = hold
        self._drop = drop
        self._clock = 0
        self._parent: dict[int, int | None] = {}  # every held block -> the block before it
        self._branches: dict[int, int] = {}  # blocks with two or more children -> how many
        self._leaves: dict[int, int] = {}  # blocks without children -> stamp of their last use
        self._touched: dict[int, int] = {}  # blocks with children at which a later prompt ended -> its stamp
        self._heap: list[tuple[int, int]] = []  # (stamp, leaf), with outdated entries

    def __len__(self) -> int:
        return len(self._parent)

    @property
    def limit_blocks(self) -> int:
        return int(self.capacity_blocks * self.scale)

    def use(self, keys: Sequence[int]) -> None:
        """A prompt went to the worker: its blocks are held and are the newest; the oldest leaves go when the worker is full.

        Args:
            keys: chain keys of the prompt's whole blocks, in order.
        """
        n = len(keys)
        if not n:
            return
        known = self._known(keys)
        self._clock += 1
        stamp = self._clock
        if known == n:
            last = keys[-1]
            if last in self._leaves:
                self._set_leaf(last, stamp)
            else:
                self._touched[last] = stamp
            return
        before = keys[known - 1] if known else None
        if before is not None and self._leaves.pop(before, None) is None:
            self._branches[before] = self._branches.get(before, 1) + 1
            self._touched.pop(before, None)  # the new leaf behind it is newer
        for key in keys[known:]:
            self._parent[key] = before
            self._hold(key)
            before = key
        self._set_leaf(keys[-1], stamp)
        self._evict()

    def resize(self, capacity_blocks: int) -> None:
        """What a block stands for is known better now, so how many the worker holds."""
        self.capacity_blocks = capacity_blocks
        self._evict()

    def feedback(self, predicted_tokens: int, actual_tokens: int, tolerance_tokens: float) -> None:
        """Corrects the size by what the worker really had cached for one prompt."""
        if actual_tokens + tolerance_tokens <= predicted_tokens:
            self.scale = max(MIN_SCALE, self.scale * SHRINK)
            self._evict()
        elif predicted_tokens:
            self.scale = min(1.0, self.scale * GROW)

    def held_keys(self) -> Sequence[int]:
        """All held blocks."""
        return list(self._parent)

    def check_integrity(self) -> None:
        """Raises AssertionError when the tables disagree."""
        children: dict[int, int] = {}
        for parent in self._parent.values():
            if parent is not None:
                assert parent in self._parent, "a block is held without the one before it"
                children[parent] = children.get(parent, 0) + 1
        assert self._leaves.keys() == self._parent.keys() - children.keys()
        assert self._branches == {key: n for key, n in children.items() if n > 1}
        assert self._touched.keys() <= children.keys()
        assert {(stamp, key) for key, stamp in self._leaves.items()} <= set(self._heap)
        assert len(self._parent) <= max(0, self.limit_blocks)

    def _known(self, keys: Sequence[int]) -> int:
        """How many of the prompt's first blocks are held; held blocks are closed under prefixes, so bisection finds it."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in self._parent:
                low = middle
            else:
                high = middle - 1
        return low

    def _set_leaf(self, key: int, stamp: int) -> None:
        self._leaves[key] = stamp
        heapq.heappush(self._heap, (stamp, key))
        if len(self._heap) > 2 * len(self._leaves) + _SLACK:
            self._heap = [(s, k) for k, s in self._leaves.items()]
            heapq.heapify(self._heap)

    def _evict(self) -> None:
        limit = self.limit_blocks
        while len(self._parent) > limit:
            stamp, key = heapq.heappop(self._heap)
            if self._leaves.get(key) != stamp:
                continue
            del self._leaves[key]
            before = self._parent.pop(key)
            self._drop(key)
            if before is None:
                continue
            children = self._branches.get(before, 1)
            if children > 2:
                self._branches[before] = children - 1
            elif children == 2:
                del self._branches[before]
            else:
                self._set_leaf(before, max(stamp, self._touched.pop(before, 0)))
