"""KV memory as the scheduler sees it: pages and prefix tree behind one ledger of promises.

A request gets a `Lease`: a locked cached prefix, pages of its own, and a promise of pages that it is sure to get. Free plus evictable pages
never fall below the sum of all promises. Beyond its promise a lease grows only while pages are left that nobody was promised; where none
is, the caller takes pages back from some request (retraction). A promise of all that a request may ever need makes it safe from that.

Pages that become free while a step is computed may still be read or written by it. They are set aside until that step has landed: `step_launched`
and `step_landed` say when. The steps themselves run in order, so a page that goes from the tree to a later step needs no such care.

Called by the scheduler only, from its one thread. Freed pages go through `on_free` (debug_checks poisons them there).
"""

from __future__ import annotations

from collections import deque
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
    namespace: bytes = b""
    priority: int = 0
    shared: int = 0
    count: int = 0
    promised: int = 0  # pages it may still take for sure
    released: bool = field(default=False)
    moves: int = 0  # how often pages before `count` were exchanged for others

    def own_pages(self) -> list[int]:
        """Pages owned by the request."""
        own: list[int] = self.table[self.shared : self.count].tolist()
        return own


def _nothing(_: Sequence[int]) -> None:
    return None


class KvMemory:
    """See the module."""

    def __init__(self, num_pages: int, *, eviction: str = "lru", on_free: Callable[[Sequence[int]], None] = _nothing) -> None:
        self.pages = PageAllocator(num_pages)
        self.tree = RadixTree(eviction)
        self.promised = 0
        self._on_free = on_free
        self._launched = 0
        self._landed = 0
        self._aside: deque[tuple[int, list[int]]] = deque()  # freed while step n was the last launched; still counted as a request's
        self._aside_count = 0
        self._lost: list[int] = []  # nobody gets them any more: `start_anew`

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def headroom(self) -> int:
        """Pages that can still be promised. Below 0 for a moment where pages set aside were promised to somebody."""
        return self.pages.count(owners.FREE) + self.tree.evictable - self.promised

    def step_launched(self) -> None:
        """A step was given to the executor; it uses pages of live leases as they are now."""
        self._launched += 1

    def step_landed(self) -> None:
        """The oldest launched step is done: what was freed since, and before any later launch, is free now."""
        self._landed += 1
        while self._aside and self._aside[0][0] <= self._landed:
            _, pages = self._aside.popleft()
            self._aside_count -= len(pages)
            self._free_now(pages, old=owners.REQUEST)

    def peek(self, key: bytes, prefix_pages: int, namespace: bytes = b"") -> int:
        """Pages of the prefix that `admit` would find; changes nothing."""
        return self.tree.peek(key, prefix_pages, namespace)

    def admit(
        self,
        key: bytes,
        *,
        prefix_pages: int,
        total_pages: int,
        promise: int | None = None,
        reserve: int = 0,
        namespace: bytes = b"",
        priority: int = 0,
    ) -> Lease | None:
        """Matches and locks the cached prefix of `key` (at most `prefix_pages` pages) and promises the rest of `promise` pages.

        None, and nothing changed, when that cannot be promised now.

        Args:
            total_pages: most it may ever hold. promise: pages, the prefix included, that it is sure to get; None: all.
            reserve: pages that must be left over besides: what others will probably take.
            priority: of what the lease commits, for the eviction policy of that name.
        """
        node, hit = self.tree.match(key, prefix_pages, namespace)
        self.tree.lock(node)  # first: what is locked is no longer evictable
        need = max(0, (total_pages if promise is None else min(promise, total_pages)) - len(hit))
        if need + reserve > self.headroom:
            self.tree.unlock(node)
            return None
        self.tree.use(node)
        table = np.zeros(total_pages, dtype=np.int32)
        table[: len(hit)] = hit
        self.promised += need
        return Lease(table=table, node=node, namespace=namespace, priority=priority, shared=len(hit), count=len(hit), promised=need)

    def grow(self, lease: Lease, count: int) -> bool:
        """Takes pages until the lease has `count` in all, promised ones first; evicts from the tree when none is free.

        False, and nothing changed, where it wants more than its promise and nothing is left, or where its pages are still set aside for a
        step: they come when that has landed.
        """
        need = count - lease.count
        if need <= 0:
            return True
        extra = max(0, need - lease.promised)
        free = self.pages.count(owners.FREE)
        if (extra and extra > self.headroom) or need > free + self.tree.evictable:
            return False
        if need > free:
            self._free_now(self.tree.evict(need - free), old=owners.TREE)
        lease.table[lease.count : count] = self.pages.take(need)
        lease.count = count
        lease.promised -= need - extra
        self.promised -= need - extra
        return True

    def commit(self, lease: Lease, key: bytes) -> None:
        """Hands the pages of the whole-page prefix `key` to the tree, which owns them from now on, and keeps them locked.

        Where the tree had the prefix already, the lease's own copies are freed and its table points to the tree's. The caller
        commits only what is computed.
        """
        whole = len(key) // (4 * PAGE_SIZE)
        if whole <= lease.shared:
            return
        mine: list[int] = lease.table[:whole].tolist()
        node, already, theirs = self.tree.insert(lease.node, lease.shared, key, mine, lease.namespace, lease.priority)
        self.tree.lock(node)
        self.tree.unlock(lease.node)
        self.pages.give(mine[already:], old=owners.REQUEST, new=owners.TREE)
        self._free(mine[lease.shared : already])
        if already > lease.shared:
            lease.table[lease.shared : already] = theirs
            lease.moves += 1
        lease.node = node
        lease.shared = whole

    def release(self, lease: Lease) -> None:
        """Ends a lease: own pages become free, the prefix unlocked, the promise void."""
        assert not lease.released, "a lease ends once"
        lease.released = True
        self._free(lease.own_pages())
        self.tree.unlock(lease.node)
        self.promised -= lease.promised

    def flush(self) -> int:
        """Empties the tree but for what live leases lock; returns the pages that became free."""
        pages = self.tree.clear()
        self._free_now(pages, old=owners.TREE)
        return len(pages)

    def _free(self, pages: list[int]) -> None:
        """Frees a request's pages, or sets them aside while a step is computed."""
        if not pages:
            return
        if self._launched > self._landed:
            self._aside.append((self._launched, pages))
            self._aside_count += len(pages)
        else:
            self._free_now(pages, old=owners.REQUEST)

    def _free_now(self, pages: list[int], *, old: int) -> None:
        if pages:
            self.pages.give(pages, old=old, new=owners.FREE)
            self._on_free(pages)

    def rebuild(self, leases: Iterable[Lease]) -> None:
        """Makes owners, locks and promises anew, from the leases and the tree's nodes. Called by the self-check, when no step is out. Raises
        AssertionError where a page has two owners."""
        live = list(leases)
        owner = dict.fromkeys(self._lost, owners.REQUEST)
        owner |= dict.fromkeys((p for node in self.tree.nodes() for p in node.pages), owners.TREE)
        for lease in live:
            for page in lease.own_pages():
                assert page not in owner, f"page {page} has two owners"
                owner[page] = owners.REQUEST
        self._take_owners(owner)
        self.tree.rebuild([lease.node for lease in live])
        self.promised = sum(lease.promised for lease in live)

    def start_anew(self, lost: Sequence[int]) -> None:
        """An empty tree and free pages, but for `lost` ones, now and before, which nobody gets any more. No lease may live."""
        self.tree.reset()
        self.promised = 0
        self._lost = list(dict.fromkeys([*self._lost, *lost]))
        self._take_owners(dict.fromkeys(self._lost, owners.REQUEST))

    def _take_owners(self, owner: dict[int, int]) -> None:
        self._aside.clear()
        self._aside_count = 0
        self.pages = PageAllocator(self.num_pages)
        taken = self.pages.take(max(owner, default=-1) + 1)  # a new allocator gives pages in their order
        for kind in (owners.TREE, owners.FREE):
            self.pages.give([p for p in taken if owner.get(p, owners.FREE) == kind], old=owners.REQUEST, new=kind)

    def check_quickly(self, leases: Iterable[Lease]) -> None:
        """Counts only, in time proportional to the leases."""
        live = list(leases)
        own = sum(lease.count - lease.shared for lease in live)
        counts = [self.pages.count(owner) for owner in (owners.FREE, owners.TREE, owners.REQUEST)]
        assert sum(counts) == self.pages.num_pages, f"{counts} pages are not {self.pages.num_pages}"
        assert own + self._aside_count + len(self._lost) == self.pages.count(owners.REQUEST), "a page belongs to no live request"
        assert self.tree.evictable + self.tree.protected == self.pages.count(owners.TREE), "a page belongs to no node"
        assert sum(lease.promised for lease in live) == self.promised, "promises differ from those of the leases"

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Free + tree + pages of live leases is everything, each page once; locks and promises equal those of the leases."""
        self.pages.check_integrity()
        self.tree.check_integrity()
        live = list(leases)
        self.check_quickly(live)
        aside = [p for _, pages in self._aside for p in pages]
        own = [p for lease in live for p in lease.own_pages()] + aside + self._lost
        assert len(aside) == self._aside_count
        assert len(own) == len(set(own)), "two requests own one page"
        assert all(self.pages.owner(p) == owners.REQUEST for p in own)
        in_tree = [p for node in self.tree.nodes() for p in node.pages]
        assert all(self.pages.owner(p) == owners.TREE for p in in_tree)
        assert len(in_tree) == self.pages.count(owners.TREE), "a page belongs to no node"
        assert self.headroom + self._aside_count >= 0, "more is promised than there is"
        at_root = sum(1 for lease in live if lease.node is not self.tree.root)
        assert sum(child.locks for child in self.tree.root.children.values()) == at_root, "locks and live handles differ"
        for lease in live:
            path, node = list[int](), lease.node
            while node.parent is not None:
                path[:0] = node.pages
                node = node.parent
            assert path == lease.table[: lease.shared].tolist(), "a lease's prefix is not the tree's"
