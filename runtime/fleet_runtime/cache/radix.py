"""The prefix tree: which token prefixes have their KV in which pages. Page granularity; a partial last page is never in it.

Pure bookkeeping, called by `cache.memory`. Tokens come as bytes (int32, in order), so that comparing a run of pages is one C call. An edge
holds one page or more; the key of a child is the bytes of its first page, with the namespace in front of it at the root, so that
namespaces share nothing. A lock on a node protects it and all nodes above it from eviction. A split keeps the deeper half as the same node
object, so that a handle always names the whole prefix it was given for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

from fleet_contract.names import PAGE_SIZE

TOKEN_BYTES: Final = 4
PAGE_KEY_BYTES: Final = PAGE_SIZE * TOKEN_BYTES


class Node:
    """One edge of the tree with its pages: `key` holds len(pages) x PAGE_KEY_BYTES bytes."""

    __slots__ = ("children", "key", "locks", "name", "pages", "parent", "queued", "tick")

    def __init__(self, parent: Node | None, name: bytes, key: bytes, pages: list[int], tick: int) -> None:
        self.parent = parent
        self.name = name  # its key in parent.children
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0  # handles on this node or below it
        self.tick = tick  # last use
        self.queued = False  # has its one entry in the eviction heap


class RadixTree:
    """See the module. Pages named here are owned by the tree; `insert` takes them over, `evict` gives them back."""

    def __init__(self) -> None:
        self.root = Node(None, b"", b"", [], 0)
        self.root.locks = 1  # for good
        self.evictable = 0  # pages of nodes without a lock
        self.protected = 0  # pages of locked nodes
        self._tick = 0
        self._heap: list[tuple[int, int, Node]] = []  # unlocked leaves by last use; entries may be stale
        self._serial = 0

    def match(self, key: bytes, max_pages: int, namespace: bytes = b"") -> tuple[Node, list[int]]:
        """The longest cached prefix, at most `max_pages` pages: its node and its pages. Counts as a use; takes no lock."""
        self._tick += 1
        node, pages, at = self.root, list[int](), 0
        while at < max_pages and (child := node.children.get(self._name(node, key, at, namespace))) is not None:
            same = min(_common_pages(child.key, key, at), max_pages - at)
            if same < len(child.pages):
                child = self._split(child, same)
            child.tick = self._tick
            pages += child.pages
            at += same
            node = child
        return node, pages

    def peek(self, key: bytes, max_pages: int, namespace: bytes = b"") -> int:
        """Pages that `match` would find now; changes nothing."""
        node, at = self.root, 0
        while at < max_pages and (child := node.children.get(self._name(node, key, at, namespace))) is not None:
            same = min(_common_pages(child.key, key, at), max_pages - at)
            at += same
            if same < len(child.pages):
                break
            node = child
        return at

    def insert(self, start: Node, depth: int, key: bytes, pages: Sequence[int], namespace: bytes = b"") -> tuple[Node, int, list[int]]:
        """Adds a prefix below a node that already holds its first `depth` pages.

        Args:
            start: a locked node, or the root with depth 0.
            depth: pages from the root to the end of `start`.
            key: tokens of the whole prefix, len(pages) pages.
            pages: pages of the whole prefix; those behind the part that is already here become the tree's.
        Returns:
            The node that ends the prefix; how many leading pages were here before (at least `depth`); the tree's pages of [depth, that).
        """
        self._touch(start)
        node, at, theirs = start, depth, list[int]()
        while at < len(pages) and (child := node.children.get(self._name(node, key, at, namespace))) is not None:
            same = min(_common_pages(child.key, key, at), len(pages) - at)
            if same < len(child.pages):
                child = self._split(child, same)
            child.tick = self._tick
            theirs += child.pages
            at += same
            node = child
        already = at
        if at < len(pages):
            name = self._name(node, key, at, namespace)
            leaf = Node(node, name, key[at * PAGE_KEY_BYTES : len(pages) * PAGE_KEY_BYTES], list(pages[at:]), self._tick)
            node.children[name] = leaf
            self.evictable += len(leaf.pages)
            self._offer(leaf)
            node = leaf
        return node, already, theirs

    def lock(self, node: Node) -> None:
        """Protects a node and all above it until as many `unlock`s."""
        at: Node | None = node
        while at is not None and at is not self.root:
            if at.locks == 0:
                self.evictable -= len(at.pages)
                self.protected += len(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Takes one lock back; counts as a use."""
        self._touch(node)
        at: Node | None = node
        while at is not None and at is not self.root:
            assert at.locks > 0, "unlock without lock"
            at.locks -= 1
            if at.locks == 0:
                self.evictable += len(at.pages)
                self.protected -= len(at.pages)
                self._offer(at)
            at = at.parent

    def evict(self, n: int) -> list[int]:
        """Drops `n` pages from the least recently used unlocked leaves, deepest pages first, and returns them. Fewer only if there are no more."""
        out: list[int] = []
        while len(out) < n and self._heap:
            tick, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.children or node.parent is None:
                continue
            if tick != node.tick:
                self._offer(node)
                continue
            keep = max(0, len(node.pages) - (n - len(out)))
            out += node.pages[keep:]
            self.evictable -= len(node.pages) - keep
            if keep:
                del node.pages[keep:]
                node.key = node.key[: keep * PAGE_KEY_BYTES]
                self._offer(node)
            else:
                parent = node.parent
                del parent.children[node.name]
                node.parent = None
                self._offer(parent)
        return out

    def _touch(self, node: Node) -> None:
        """A use of the whole prefix that `node` ends: a parent is never older than its children."""
        self._tick += 1
        at: Node | None = node
        while at is not None:
            at.tick = self._tick
            at = at.parent

    def _offer(self, node: Node) -> None:
        """Queues a node for eviction if it is an unlocked leaf; a node has at most one entry in the heap."""
        if not node.locks and not node.children and not node.queued:
            self._serial += 1
            node.queued = True
            heapq.heappush(self._heap, (node.tick, self._serial, node))

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node behind its first `at` pages (0 < at < all); returns the new upper half."""
        assert node.parent is not None and 0 < at < len(node.pages)
        cut = at * PAGE_KEY_BYTES
        upper = Node(node.parent, node.name, node.key[:cut], node.pages[:at], node.tick)
        upper.locks = node.locks
        node.parent.children[node.name] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[at:]
        node.parent = upper
        node.name = node.key[:PAGE_KEY_BYTES]
        upper.children[node.name] = node
        return upper

    def _name(self, parent: Node, key: bytes, at: int, namespace: bytes) -> bytes:
        page = key[at * PAGE_KEY_BYTES : (at + 1) * PAGE_KEY_BYTES]
        return namespace + b"\0" + page if parent is self.root else page

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Counts, names, locks and the eviction heap agree with the tree. O(nodes)."""
        evictable = protected = 0
        seen: set[int] = set()
        queued = {id(entry[2]) for entry in self._heap if entry[2].queued}
        assert self.root.locks == 1 and not self.root.pages
        for node in self.nodes():
            assert node.parent is not None and node.parent.children[node.name] is node
            assert node.pages and len(node.key) == len(node.pages) * PAGE_KEY_BYTES, "a node without pages, or with a partial one"
            assert node.name.endswith(node.key[:PAGE_KEY_BYTES])
            assert node.locks >= sum(child.locks for child in node.children.values()), "a child is locked and its parent is not"
            assert node.parent is self.root or node.parent.tick >= node.tick, "a parent is older than its child"
            assert not seen.intersection(node.pages) and len(set(node.pages)) == len(node.pages), "a page is in the tree twice"
            seen.update(node.pages)
            if node.locks:
                protected += len(node.pages)
            else:
                evictable += len(node.pages)
                assert node.children or id(node) in queued, "an unlocked leaf cannot be evicted"
        assert (evictable, protected) == (self.evictable, self.protected)
        entries = [id(entry[2]) for entry in self._heap]
        assert len(entries) == len(set(entries)), "a node is queued twice"


def _common_pages(edge: bytes, key: bytes, at: int) -> int:
    """Leading pages that `edge` shares with `key` from page `at` on: one comparison if all, else a binary search for the first difference."""
    begin = at * PAGE_KEY_BYTES
    high = min(len(edge), len(key) - begin) // PAGE_KEY_BYTES
    if edge[: high * PAGE_KEY_BYTES] == key[begin : begin + high * PAGE_KEY_BYTES]:
        return high
    low = 0  # pages known to be equal; `high` pages are known to differ
    while high - low > 1:
        mid = (low + high) // 2
        if edge[low * PAGE_KEY_BYTES : mid * PAGE_KEY_BYTES] == key[begin + low * PAGE_KEY_BYTES : begin + mid * PAGE_KEY_BYTES]:
            low = mid
        else:
            high = mid
    return low
