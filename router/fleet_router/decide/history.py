"""What one worker probably holds, judged from the prompts sent to it: a least-recently-used cache of blocks, leaf first.

Used by `index` for workers whose engine tells no KV events, or whose event stream cannot be trusted, and for all keys of bytes. Because
a block can only leave after the blocks behind it, only leaves need a place in the order of use: a prompt that is known already costs
one stamp, however long it is.

Of prompts that other routers sent there only some keys are known (`told`). Each stands for the blocks since the one before it, until a
prompt of ours names them all.
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
    """Blocks of one worker. `hold(key)` and `drop(key)` are told of each block that comes and goes, the `_told` ones of keys of others."""

    __slots__ = (
        "_blocks", "_branches", "_clock", "_drop", "_drop_told", "_gaps", "_heap", "_hold", "_hold_told", "_leaves", "_parent", "_touched",
        "capacity_blocks", "scale",
    )  # fmt: skip

    def __init__(
        self, capacity_blocks: int, hold: Callable[[int], None], drop: Callable[[int], None],
        hold_told: Callable[[int], None] = lambda key: None, drop_told: Callable[[int], None] = lambda key: None,
    ) -> None:  # fmt: skip
        self.capacity_blocks = capacity_blocks
        self.scale = 1.0
        self._hold = hold
        self._drop = drop
        self._hold_told = hold_told
        self._drop_told = drop_told
        self._clock = 0
        self._blocks = 0
        self._gaps: dict[int, int] = {}  # keys told by others -> blocks that each stands for; the others stand for one
        self._parent: dict[int, int | None] = {}  # every held block -> the block before it
        self._branches: dict[int, int] = {}  # blocks with two or more children -> how many
        self._leaves: dict[int, int] = {}  # blocks without children -> stamp of their last use
        self._touched: dict[int, int] = {}  # blocks with children at which a later prompt ended -> its stamp
        self._heap: list[tuple[int, int]] = []  # (stamp, leaf), with outdated entries

    def __len__(self) -> int:
        return self._blocks

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
        is_new = False  # `before` has no children yet, and is no leaf either
        for key in keys[known:]:
            if key in self._gaps:
                self._name(key, before, is_new=is_new)
                is_new = False
            else:
                if not is_new:
                    self._add_child(before)
                self._parent[key] = before
                self._blocks += 1
                self._hold(key)
                is_new = True
            before = key
        self._use_last(keys[-1], stamp, is_new=is_new)
        self._evict()

    def use_told(self, prefix: Sequence[tuple[int, int]]) -> None:
        """A prompt of another router went to the worker. Args: prefix: some of its (depth in blocks, key), rising."""
        if not prefix:
            return
        self._clock += 1
        before: int | None = None
        at, is_new = 0, False
        for depth, key in prefix:
            if key not in self._parent:
                if not is_new:
                    self._add_child(before)
                self._parent[key] = before
                self._gaps[key] = depth - at
                self._blocks += depth - at
                self._hold_told(key)
                is_new = True
            else:
                if is_new and before is not None:
                    self._set_leaf(before, self._clock)  # what was told before went by other depths
                is_new = False
            before, at = key, depth
        self._use_last(prefix[-1][1], self._clock, is_new=is_new)
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
        """All held blocks that are known one by one."""
        return [key for key in self._parent if key not in self._gaps]

    def told_keys(self) -> Sequence[int]:
        """The keys that stand for blocks of others' prompts."""
        return list(self._gaps)

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
        assert self._gaps.keys() <= self._parent.keys() and all(n > 0 for n in self._gaps.values())
        assert all(parent not in self._gaps for key, parent in self._parent.items() if key not in self._gaps), "a named block behind a gap"
        assert self._blocks == len(self._parent) - len(self._gaps) + sum(self._gaps.values()) <= max(0, self.limit_blocks)

    def _known(self, keys: Sequence[int]) -> int:
        """How many of the prompt's first blocks are held and named; these are closed under prefixes, so bisection finds it."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in self._parent and keys[middle - 1] not in self._gaps:
                low = middle
            else:
                high = middle - 1
        return low

    def _name(self, key: int, before: int | None, *, is_new: bool) -> None:
        """A key that others told stands for itself alone now, behind `before`."""
        was = self._parent[key]
        if was != before:
            if not is_new:
                self._add_child(before)
            self._remove_child(was, self._clock)
            self._parent[key] = before
        self._blocks += 1 - self._gaps.pop(key)
        self._drop_told(key)
        self._hold(key)

    def _use_last(self, key: int, stamp: int, *, is_new: bool) -> None:
        if is_new or key in self._leaves:
            self._set_leaf(key, stamp)
        else:
            self._touched[key] = stamp

    def _add_child(self, key: int | None) -> None:
        if key is not None and self._leaves.pop(key, None) is None:
            self._branches[key] = self._branches.get(key, 1) + 1
        if key is not None:
            self._touched.pop(key, None)  # the new leaf behind it is newer

    def _remove_child(self, key: int | None, stamp: int) -> None:
        """Args: stamp: of the last use of what is gone; the key becomes a leaf of that age when it has no other child."""
        if key is None:
            return
        children = self._branches.get(key, 1)
        if children > 2:
            self._branches[key] = children - 1
        elif children == 2:
            del self._branches[key]
        else:
            self._set_leaf(key, max(stamp, self._touched.pop(key, 0)))

    def _set_leaf(self, key: int, stamp: int) -> None:
        self._leaves[key] = stamp
        heapq.heappush(self._heap, (stamp, key))
        if len(self._heap) > 2 * len(self._leaves) + _SLACK:
            self._heap = [(s, k) for k, s in self._leaves.items()]
            heapq.heapify(self._heap)

    def _evict(self) -> None:
        limit = self.limit_blocks
        while self._blocks > limit:
            stamp, key = heapq.heappop(self._heap)
            if self._leaves.get(key) != stamp:
                continue
            del self._leaves[key]
            before = self._parent.pop(key)
            gap = self._gaps.pop(key, 0)
            self._blocks -= gap or 1
            if gap:
                self._drop_told(key)
            else:
                self._drop(key)
            self._remove_child(before, stamp)
