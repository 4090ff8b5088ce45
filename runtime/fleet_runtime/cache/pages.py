"""Owner of every KV page: which are free, which belong to the prefix tree, which to a request.

Pure bookkeeping over page numbers, called by `cache.memory`; it knows neither tokens nor bytes. Costs are proportional to the pages moved,
and memory to the most pages ever used at once, not to the pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

FREE: Final = 0
TREE: Final = 1
REQUEST: Final = 2


class PageAllocator:
    """`num_pages` pages, each with exactly one owner class."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._owner = bytearray(num_pages)
        self._returned = array("q")  # free pages that were used before; the last in is the first out
        self._fresh = 0  # pages from here on were never used
        self._count = [num_pages, 0, 0]

    def count(self, owner: int) -> int:
        """Pages of one owner class."""
        return self._count[owner]

    def owner(self, page: int) -> int:
        """Owner class of a page."""
        return self._owner[page]

    def take(self, n: int) -> list[int]:
        """Gives `n` free pages to a request; the caller has made sure that there are enough."""
        assert 0 <= n <= self._count[FREE], (n, self._count[FREE])
        out: list[int] = []
        while len(out) < n:
            if self._returned:
                page = self._returned.pop()
            else:
                page = self._fresh
                self._fresh += 1
            self._owner[page] = REQUEST
            out.append(page)
        self._count[FREE] -= n
        self._count[REQUEST] += n
        return out

    def give(self, pages: Sequence[int], *, old: int, new: int) -> None:
        """Moves pages from one owner class to another. Each must belong to `old`."""
        for page in pages:
            assert self._owner[page] == old, f"page {page} belongs to class {self._owner[page]}, not {old}"
            self._owner[page] = new
        if new == FREE:
            self._returned.extend(pages)
        self._count[old] -= len(pages)
        self._count[new] += len(pages)

    def check_integrity(self) -> None:
        """Each page has one owner, and the counts say so. O(pages ever used)."""
        used = self._owner[: self._fresh]
        assert not any(self._owner[self._fresh :]), "a page that was never handed out has an owner"
        returned = list(self._returned)
        assert len(set(returned)) == len(returned), "a page is free twice"
        assert all(self._owner[p] == FREE and p < self._fresh for p in returned)
        assert used.count(FREE) == len(returned), "a free page is lost"
        assert self._count == [len(returned) + self.num_pages - self._fresh, used.count(TREE), used.count(REQUEST)]
