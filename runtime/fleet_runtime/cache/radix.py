"""The prefix tree: which token prefixes have their KV in which pages. Page granularity; a partial last page is never in it.

Pure bookkeeping, called by `cache.memory`. Tokens come as bytes (int32, in order), so that comparing a run of pages is one C call. An edge
holds one page or more; the key of a child is the bytes of its first page, with the namespace in front of it at the root, so that
namespaces share nothing. A lock on a node protects it and all nodes above it from eviction. A split keeps the deeper half as the same node
object, so that a handle always names the whole prefix it was given for.

Which unlocked leaf goes first is a number per policy, and among equal numbers the longest unused: lru 0; lfu how often it was hit (`use`);
fifo when it was made; priority the highest of those who inserted it. The leaves are kept in that order, so an eviction looks at nothing
that stays. Changes are told to a listener (KV events), with the chain hash of each new page; without a listener nothing is hashed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from fleet_contract.names import PAGE_SIZE
from fleet_contract.prefix import extend_chain

TOKEN_BYTES: Final = 4
PAGE_KEY_BYTES: Final = PAGE_SIZE * TOKEN_BYTES
EVICTION_POLICIES: Final = ("lru", "lfu", "fifo", "priority")


def namespace_of(lora: str, salt: str) -> bytes:
    """The namespace of a LoRA and a cache salt: different pairs, different bytes; b"" for neither."""
    return msgspec.msgpack.encode([lora, salt]) if lora or salt else b""


def names_of(namespace: bytes) -> tuple[str, str]:
    """Inverse of `namespace_of`."""
    return msgspec.msgpack.decode(namespace, type=tuple[str, str]) if namespace else ("", "")


@dataclass(frozen=True, slots=True)
class Run:
    """Pages that follow one another in the tree. Nothing of it is ever changed: it may be read by another thread."""

    namespace: bytes
    base: int  # pages before the first of these
    parent: int | None  # chain hash of the page before; None at the root
    key: bytes  # tokens, PAGE_KEY_BYTES per page
    hashes: Sequence[int]  # chain hash of each page


class TreeListener(Protocol):
    """Is told of each change, in order, by the thread that makes it."""

    def root_hash(self, namespace: bytes) -> int:
        """What the chain of a namespace starts from."""

    def stored(self, run: Run) -> None:
        """The tree now holds these pages."""

    def removed(self, hashes: Sequence[int]) -> None:
        """The tree no longer holds these pages, deepest of each prefix first."""

    def cleared(self) -> None:
        """The tree holds nothing any more."""


_Entry = tuple[int, int, int, "Node"]  # policy's number, last use, number of the node, node


class Node:
    """One edge of the tree with its pages: `key` holds len(pages) x PAGE_KEY_BYTES bytes."""

    __slots__ = ("children", "entry", "hashes", "hits", "key", "locks", "made", "name", "number", "pages", "parent", "priority", "tick")

    def __init__(self, parent: Node | None, name: bytes, key: bytes, pages: list[int], number: int) -> None:
        self.parent = parent
        self.name = name  # its key in parent.children
        self.key = key
        self.pages = pages
        self.hashes = array("Q")  # one per page if there is a listener, else empty; replaced, never changed
        self.children: dict[bytes, Node] = {}
        self.number = number
        self.locks = 0  # handles on this node or below it
        self.tick = 0  # last use
        self.made = 0  # tick of the insert
        self.hits = 0
        self.priority = 0
        self.entry: _Entry | None = None  # its place in the order of eviction, while it is an unlocked leaf


_NUMBERS: Final[dict[str, Callable[[Node], int]]] = {
    "lru": lambda _: 0,
    "lfu": lambda node: node.hits,
    "fifo": lambda node: node.made,
    "priority": lambda node: node.priority,
}


class RadixTree:
    """See the module. Pages named here are owned by the tree; `insert` takes them over, `evict` and `clear` give them back."""

    def __init__(self, eviction: str = "lru", listener: TreeListener | None = None) -> None:
        assert eviction in EVICTION_POLICIES, f"eviction policy {eviction!r} is none of {EVICTION_POLICIES}"
        self.root = Node(None, b"", b"", [], 0)
        self.root.locks = 1  # for good
        self.evictable = 0  # pages of nodes without a lock
        self.protected = 0  # pages of locked nodes
        self.eviction = eviction
        self._number_of = _NUMBERS[eviction]
        self._listener = listener
        self._tick = 0
        self._nodes = 0  # ever made
        self._order: list[_Entry] = []  # the unlocked leaves, first to go first

    def listen(self, listener: TreeListener) -> None:
        """Tells a listener of all changes from now on; only an empty tree has told all it must."""
        assert not self.root.children, "a listener must hear of every page"
        self._listener = listener

    def match(self, key: bytes, max_pages: int, namespace: bytes = b"") -> tuple[Node, list[int]]:
        """The longest cached prefix, at most `max_pages` pages: its node and its pages. Makes it the last used; takes no lock.

        A hit for lfu is counted by `use`, since a match may come to nothing (no room) and be tried again.
        """
        self._tick += 1
        node, pages, at = self.root, list[int](), 0
        while at < max_pages and (found := self._next(node, key, at, max_pages, namespace)) is not None:
            child, same = found
            if same < len(child.pages):
                child = self._split(child, same)
            child.tick = self._tick
            pages += child.pages
            at += same
            node = child
        self._place(node)
        return node, pages

    def peek(self, key: bytes, max_pages: int, namespace: bytes = b"") -> int:
        """Pages that `match` would find now; changes nothing."""
        node, at = self.root, 0
        while at < max_pages and (found := self._next(node, key, at, max_pages, namespace)) is not None:
            node, same = found
            at += same
            if same < len(node.pages):
                break
        return at

    def use(self, node: Node) -> None:
        """A request was admitted on this prefix: one hit for each node from here to the root. O(nodes of the prefix)."""
        at: Node | None = node
        while at is not None:
            at.hits += 1
            at = at.parent
        self._place(node)

    def insert(
        self, start: Node, depth: int, key: bytes, pages: Sequence[int], namespace: bytes = b"", priority: int = 0
    ) -> tuple[Node, int, list[int]]:
        """Adds a prefix below a node that already holds its first `depth` pages.

        Args:
            start: a locked node, or the root with depth 0.
            depth: pages from the root to the end of `start`.
            key: tokens of the whole prefix, len(pages) pages.
            pages: pages of the whole prefix; those behind the part that is already here become the tree's.
            namespace: that of `start`, if that is not the root.
            priority: raises that of all nodes of the prefix, if theirs is lower.
        Returns:
            The node that ends the prefix; how many leading pages were here before (at least `depth`); the tree's pages of [depth, that).
        """
        self._touch(start, priority)
        node, at, theirs = start, depth, list[int]()
        while at < len(pages) and (found := self._next(node, key, at, len(pages), namespace)) is not None:
            child, same = found
            if same < len(child.pages):
                child = self._split(child, same)
            child.tick = self._tick
            child.priority = max(child.priority, priority)
            theirs += child.pages
            at += same
            node = child
        if at < len(pages):
            node = self._add(node, at, key[at * PAGE_KEY_BYTES : len(pages) * PAGE_KEY_BYTES], list(pages[at:]), namespace, priority)
        else:
            self._place(node)
        return node, depth + len(theirs), theirs

    def _add(self, parent: Node, base: int, key: bytes, pages: list[int], namespace: bytes, priority: int) -> Node:
        self._nodes += 1
        leaf = Node(parent, self._name(parent, key, 0, namespace), key, pages, self._nodes)
        leaf.tick = leaf.made = self._tick
        leaf.priority = priority
        parent.children[leaf.name] = leaf
        self.evictable += len(pages)
        self._place(parent)  # no leaf any more
        self._place(leaf)
        if self._listener is not None:
            last = None if parent is self.root else parent.hashes[-1]
            leaf.hashes = extend_chain(self._listener.root_hash(namespace) if last is None else last, key)
            self._listener.stored(Run(namespace, base, last, key, leaf.hashes))
        return leaf

    def lock(self, node: Node) -> None:
        """Protects a node and all above it until as many `unlock`s."""
        at: Node | None = node
        while at is not None and at is not self.root:
            if at.locks == 0:
                self.evictable -= len(at.pages)
                self.protected += len(at.pages)
            at.locks += 1
            at = at.parent
        self._place(node)

    def unlock(self, node: Node) -> None:
        """Takes one lock back; makes the prefix the last used."""
        self._touch(node)
        at: Node | None = node
        while at is not None and at is not self.root:
            assert at.locks > 0, "unlock without lock"
            at.locks -= 1
            if at.locks == 0:
                self.evictable += len(at.pages)
                self.protected -= len(at.pages)
            at = at.parent
        self._place(node)  # those above it have a child: no leaves

    def evict(self, n: int) -> list[int]:
        """Drops `n` pages from the unlocked leaves that are first in the policy's order, deepest pages first, and returns them. Fewer only
        if there are no more."""
        out: list[int] = []
        hashes: list[int] = []
        while len(out) < n and self._order:
            node = self._order[0][3]
            keep = max(0, len(node.pages) - (n - len(out)))
            out += node.pages[keep:]
            hashes += reversed(node.hashes[keep:])
            self.evictable -= len(node.pages) - keep
            if keep:
                del node.pages[keep:]
                node.key = node.key[: keep * PAGE_KEY_BYTES]
                node.hashes = node.hashes[:keep]
            else:
                parent = node.parent
                assert parent is not None
                del parent.children[node.name]
                node.parent = None
                self._place(node)
                self._place(parent)
        if out and self._listener is not None:
            self._listener.removed(hashes)
        return out

    def clear(self) -> list[int]:
        """Drops every page that is not locked, and returns them."""
        return self.evict(self.evictable) if self.protected else self.reset()

    def reset(self) -> list[int]:
        """Drops every page, locked or not, and returns them; all handles are void. For repair, when no request holds one."""
        out: list[int] = []
        for node in list(self.nodes()):
            out += node.pages
            node.parent = node.entry = None
        self.root.children = {}
        self._order = []
        self.evictable = self.protected = 0
        if out and self._listener is not None:
            self._listener.cleared()
        return out

    def rebuild(self, handles: Iterable[Node]) -> None:
        """Makes locks, counts and the order of eviction anew from the nodes and the live handles (one for each lock). For repair."""
        self._order = []
        self.evictable = self.protected = 0
        for node in self.nodes():
            node.locks = 0
            node.entry = None
            self.evictable += len(node.pages)
        for node in handles:
            self.lock(node)
        for node in self.nodes():
            self._place(node)

    def runs(self) -> Iterator[Run]:
        """All that the tree holds, one run per node, parents first. Has hashes only with a listener. O(nodes)."""
        stack = [(child, child.name[: -PAGE_KEY_BYTES - 1], 0) for child in self.root.children.values()]
        while stack:
            node, namespace, base = stack.pop()
            last = None if base == 0 or not node.hashes else node.parent.hashes[-1]  # type: ignore[union-attr]
            yield Run(namespace, base, last, node.key, node.hashes)
            base += len(node.pages)
            stack += [(child, namespace, base) for child in node.children.values()]

    def _touch(self, node: Node, priority: int = 0) -> None:
        """A use of the whole prefix that `node` ends: a parent is never older than its children."""
        self._tick += 1
        at: Node | None = node
        while at is not None:
            at.tick = self._tick
            if at.priority < priority:
                at.priority = priority
            at = at.parent
        self._place(node)

    def _place(self, node: Node) -> None:
        """Puts a node at its place in the order of eviction if it is an unlocked leaf, and takes it out if not.

        Called for the last node of each path that changed: those above it have a child. Two bisections and a memmove of 8 bytes a leaf.
        """
        wanted: _Entry | None = None
        if not node.locks and not node.children and node.parent is not None:
            wanted = (self._number_of(node), node.tick, node.number, node)
        if node.entry is not None:
            if wanted is not None and node.entry[:2] == wanted[:2]:
                return
            del self._order[bisect_left(self._order, node.entry)]
        node.entry = wanted
        if wanted is not None:
            insort(self._order, wanted)

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node behind its first `at` pages (0 < at < all); returns the new upper half."""
        assert node.parent is not None and 0 < at < len(node.pages)
        cut = at * PAGE_KEY_BYTES
        self._nodes += 1
        upper = Node(node.parent, node.name, node.key[:cut], node.pages[:at], self._nodes)
        upper.tick, upper.made, upper.hits, upper.priority = node.tick, node.made, node.hits, node.priority
        upper.locks = node.locks
        upper.hashes = node.hashes[:at]
        node.parent.children[node.name] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[at:]
        node.hashes = node.hashes[at:]
        node.parent = upper
        node.name = node.key[:PAGE_KEY_BYTES]
        upper.children[node.name] = node
        return upper

    def _next(self, node: Node, key: bytes, at: int, limit: int, namespace: bytes) -> tuple[Node, int] | None:
        """The child that begins with page `at` of the key, and how many of its pages the key shares, at most up to page `limit`."""
        child = node.children.get(self._name(node, key, at, namespace))
        if child is None:
            return None
        n = len(child.pages)
        if n == 1 or (n <= limit - at and key.startswith(child.key, at * PAGE_KEY_BYTES)):
            return child, n
        return child, min(_common_pages(child.key, key, at), limit - at)

    def _name(self, parent: Node, key: bytes, at: int, namespace: bytes) -> bytes:
        page = key[at * PAGE_KEY_BYTES : (at + 1) * PAGE_KEY_BYTES]
        return page if parent is not self.root else namespace + b"\0" + page

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Counts, names, locks, hashes and the order of eviction agree with the tree. O(nodes)."""
        evictable = protected = leaves = 0
        seen: set[int] = set()
        assert self.root.locks == 1 and not self.root.pages and self.root.entry is None
        for node in self.nodes():
            assert node.parent is not None and node.parent.children[node.name] is node
            assert node.pages and len(node.key) == len(node.pages) * PAGE_KEY_BYTES, "a node without pages, or with a partial one"
            assert node.name.endswith(node.key[:PAGE_KEY_BYTES])
            assert node.locks >= sum(child.locks for child in node.children.values()), "a child is locked and its parent is not"
            if node.parent is not self.root:
                assert node.parent.tick >= node.tick, "a parent is older than its child"
                assert node.parent.priority >= node.priority and node.parent.made <= node.made
            assert len(node.hashes) == (len(node.pages) if self._listener is not None else 0), "a page without its hash"
            assert not seen.intersection(node.pages) and len(set(node.pages)) == len(node.pages), "a page is in the tree twice"
            seen.update(node.pages)
            if node.locks:
                protected += len(node.pages)
            else:
                evictable += len(node.pages)
            if node.locks or node.children:
                assert node.entry is None, "a node that may not go is in the order of eviction"
            else:
                leaves += 1
                assert node.entry == (self._number_of(node), node.tick, node.number, node), "a leaf is at a wrong place in the order of eviction"
        assert (evictable, protected) == (self.evictable, self.protected)
        assert len(self._order) == leaves and self._order == sorted(self._order, key=lambda e: e[:3])
        assert all(entry[3].entry is entry for entry in self._order), "the order of eviction holds a node that is gone"
        if self._listener is not None:
            self._check_hashes(self._listener)

    def _check_hashes(self, listener: TreeListener) -> None:
        for run in self.runs():
            start = listener.root_hash(run.namespace) if run.parent is None else run.parent
            assert run.hashes == extend_chain(start, run.key), "a page has another prefix's hash"


def _common_pages(edge: bytes, key: bytes, at: int) -> int:
    """Leading pages that `edge` shares with `key` from page `at` on: a binary search for the first difference. The first page is the same."""
    begin = at * PAGE_KEY_BYTES
    low = 1  # pages known to be equal
    high = min(len(edge), len(key) - begin) // PAGE_KEY_BYTES + 1  # not equal, or not there
    while high - low > 1:
        mid = (low + high) // 2
        if edge[low * PAGE_KEY_BYTES : mid * PAGE_KEY_BYTES] == key[begin + low * PAGE_KEY_BYTES : begin + mid * PAGE_KEY_BYTES]:
            low = mid
        else:
            high = mid
    return low
