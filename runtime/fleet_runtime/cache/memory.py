"""KV memory as the scheduler sees it: pages and prefix tree behind one ledger of promises.

A request gets a `Lease`: a locked cached prefix, pages of its own, and a promise of the pages it may still need until its end. Free plus
evictable pages never fall below the sum of all promises, so a request that was admitted can always end: nothing is ever preempted and
nothing can dead-lock on pages. The price is concurrency when requests ask for long answers and end early.

Called by the scheduler only, from its one thread. Freed pages go through `on_free` (debug_checks poisons them there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache import pages as owners
from fleet_runtime.cache.pages import PageAllocator
from fleet_runtime.cache.radix import Node, RadixTree


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


@dataclass(slots=True, eq=False)
class Lease:
    """One request's KV. table[:shared] belongs to the tree and is locked through `node`; table[shared:count] is the request's own."""

    table: npt.NDArray[np.int32]  # [pages it may ever need]
    node: Node
    shared: int = 0
    count: int = 0
    promised: int = 0  # pages it may still take
    released: bool = field(default=False)

    def own_pages(self) -> list[int]:
        """Pages owned by the request."""
        return [int(p) for p in self.table[self.shared : self.count]]


def _nothing(_: Sequence[int]) -> None:
    return None


class KvMemory:
    """See the module."""

    def __init__(self, num_pages: int, *, on_free: Callable[[Sequence[int]], None] = _nothing) -> None:
        self.pages = PageAllocator(num_pages)
        self.tree = RadixTree()
        self.promised = 0
        self._on_free = on_free

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def headroom(self) -> int:
        """Pages that can still be promised."""
        return self.pages.count(owners.FREE) + self.tree.evictable - self.promised

    def admit(self, key: bytes, *, prefix_pages: int, total_pages: int) -> Lease | None:
        """Matches and locks the cached prefix of `key` (at most `prefix_pages` pages) and promises the rest of `total_pages`.

        None, and nothing changed, when that cannot be promised now.
        """
        node, hit = self.tree.match(key, prefix_pages)
        self.tree.lock(node)  # first: what is locked is no longer evictable
        need = total_pages - len(hit)
        if need > self.headroom:
            self.tree.unlock(node)
            return None
        table = np.zeros(total_pages, dtype=np.int32)
        table[: len(hit)] = hit
        self.promised += need
        return Lease(table=table, node=node, shared=len(hit), count=len(hit), promised=need)

    def grow(self, lease: Lease, count: int) -> None:
        """Takes promised pages until the lease has `count` in all; evicts from the tree when none is free."""
        need = count - lease.count
        if need <= 0:
            return
        assert need <= lease.promised, "a request takes more than it was promised"
        if (short := need - self.pages.count(owners.FREE)) > 0:
            self._free(self.tree.evict(short), old=owners.TREE)
        lease.table[lease.count : count] = self.pages.take(need)
        lease.count = count
        lease.promised -= need
        self.promised -= need

    def commit(self, lease: Lease, key: bytes) -> None:
        """Hands the pages of the whole-page prefix `key` to the tree, which owns them from now on, and keeps them locked.

        Where the tree had the prefix already, the lease's own copies are freed and its table points to the tree's. The caller
        commits only what is computed.
        """
        whole = len(key) // (4 * PAGE_SIZE)
        if whole <= lease.shared:
            return
        mine = [int(p) for p in lease.table[:whole]]
        node, already, theirs = self.tree.insert(lease.node, lease.shared, key, mine)
        self.tree.lock(node)
        self.tree.unlock(lease.node)
        self.pages.give(mine[already:], old=owners.REQUEST, new=owners.TREE)
        self._free(mine[lease.shared : already], old=owners.REQUEST)
        lease.table[lease.shared : already] = theirs
        lease.node = node
        lease.shared = whole

    def release(self, lease: Lease) -> None:
        """Ends a lease: own pages become free, the prefix unlocked, the promise void."""
        assert not lease.released, "a lease ends once"
        lease.released = True
        self._free(lease.own_pages(), old=owners.REQUEST)
        self.tree.unlock(lease.node)
        self.promised -= lease.promised

    def _free(self, pages: list[int], *, old: int) -> None:
        if pages:
            self.pages.give(pages, old=old, new=owners.FREE)
            self._on_free(pages)

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Free + tree + pages of live leases is everything, each page once; locks and promises equal those of the leases."""
        self.pages.check_integrity()
        self.tree.check_integrity()
        live = list(leases)
        own = [p for lease in live for p in lease.own_pages()]
        assert len(own) == len(set(own)), "two requests own one page"
        assert all(self.pages.owner(p) == owners.REQUEST for p in own)
        assert len(own) == self.pages.count(owners.REQUEST), "a page belongs to no live request"
        in_tree = [p for node in self.tree.nodes() for p in node.pages]
        assert all(self.pages.owner(p) == owners.TREE for p in in_tree)
        assert len(in_tree) == self.pages.count(owners.TREE), "a page belongs to no node"
        assert sum(lease.promised for lease in live) == self.promised and self.headroom >= 0
        at_root = sum(1 for lease in live if lease.node is not self.tree.root)
        assert sum(child.locks for child in self.tree.root.children.values()) == at_root, "locks and live handles differ"
        for lease in live:
            path, node = list[int](), lease.node
            while node.parent is not None:
                path[:0] = node.pages
                node = node.parent
            assert path == [int(p) for p in lease.table[: lease.shared]], "a lease's prefix is not the tree's"
