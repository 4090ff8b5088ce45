"""The prefix tree against a naive model: a set of page-wise prefixes."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from fleet_runtime.cache.radix import Node, RadixTree

PAGE = 16


def key(*letters: int) -> bytes:
    """A prefix of whole pages; each page is one letter repeated."""
    return np.repeat(np.array(letters, dtype=np.int32), PAGE).tobytes()


def test_a_match_is_the_longest_prefix_of_whole_pages_up_to_its_limit() -> None:
    tree = RadixTree()
    tree.insert(tree.root, 0, key(1, 2, 3), [10, 11, 12])
    assert tree.match(key(1, 2, 3, 4), 4)[1] == [10, 11, 12]
    assert tree.match(key(1, 2, 3), 2)[1] == [10, 11]
    assert tree.match(key(1, 2, 9), 3)[1] == [10, 11]
    assert tree.match(key(9), 1)[1] == []
    assert tree.match(key(1, 2, 3) + b"\1\0\0\0" * 15, 3)[1] == [10, 11, 12]
    tree.check_integrity()


def test_an_insert_says_what_was_there_and_takes_only_the_rest() -> None:
    tree = RadixTree()
    tree.insert(tree.root, 0, key(1, 2, 3), [10, 11, 12])
    _, already, theirs = tree.insert(tree.root, 0, key(1, 2, 4, 5), [20, 21, 22, 23])
    assert (already, theirs) == (2, [10, 11])
    assert tree.match(key(1, 2, 4, 5), 4)[1] == [10, 11, 22, 23]
    assert tree.evictable == 5
    tree.check_integrity()


def test_namespaces_share_nothing() -> None:
    tree = RadixTree()
    tree.insert(tree.root, 0, key(1), [10], b"a")
    tree.insert(tree.root, 0, key(1), [11], b"b")
    assert tree.match(key(1), 1)[1] == []
    assert tree.match(key(1), 1, b"a")[1] == [10]
    assert tree.match(key(1), 1, b"b")[1] == [11]
    tree.check_integrity()


def test_a_handle_names_its_whole_prefix_after_a_split() -> None:
    tree = RadixTree()
    node, _, _ = tree.insert(tree.root, 0, key(1, 2, 3, 4), [1, 2, 3, 4])
    tree.lock(node)
    tree.insert(tree.root, 0, key(1, 2, 9), [5, 6, 7])  # splits below page 2
    assert tree.protected == 4
    assert sorted(tree.evict(10)) == [7]
    tree.unlock(node)
    assert tree.evict(10) == [3, 4, 1, 2] and tree.evictable == 0
    tree.check_integrity()


def test_eviction_takes_the_longest_unused_first_and_no_more_than_asked() -> None:
    tree = RadixTree()
    tree.insert(tree.root, 0, key(1, 2), [1, 2])
    tree.insert(tree.root, 0, key(3, 4), [3, 4])
    tree.match(key(1, 2), 2)
    assert tree.evict(1) == [4]
    assert tree.evict(2) == [3, 2]
    assert tree.match(key(1, 2), 2)[1] == [1]
    tree.check_integrity()


@pytest.mark.parametrize("nodes", [10_000])
def test_costs_follow_the_change_and_not_the_size_of_the_tree(nodes: int) -> None:
    """A hundred operations in a tree of 10,000 nodes take no more than ten times those in a tree of 100."""

    def build(n: int) -> RadixTree:
        tree = RadixTree()
        for i in range(n):
            tree.insert(tree.root, 0, key(i % 100, i), [2 * i, 2 * i + 1])
        return tree

    def work(tree: RadixTree) -> float:
        begin = time.perf_counter()
        for i in range(100):
            node, _, _ = tree.insert(tree.root, 0, key(500, 10_000 + i), [10**6 + 2 * i, 10**6 + 2 * i + 1])
            tree.lock(node)
            tree.unlock(node)
            tree.evict(2)
        return time.perf_counter() - begin

    small, large = build(100), build(nodes)
    ratio = min(work(large) for _ in range(5)) / min(work(small) for _ in range(5))
    assert ratio < 10, ratio


class TreeMachine(RuleBasedStateMachine):
    """Random inserts, matches, locks and evictions; the model maps every cached prefix (a tuple of letters) to its last page."""

    handles = Bundle("handles")
    prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.model: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[tuple[int, ...], Node]] = []
        self.fresh = itertools.count()

    def _cached(self, prefix: tuple[int, ...], limit: int) -> list[int]:
        return [self.model[p] for p in itertools.takewhile(self.model.__contains__, (prefix[:n] for n in range(1, limit + 1)))]

    @rule(prefix=prefixes)
    def insert(self, prefix: tuple[int, ...]) -> None:
        pages = [next(self.fresh) for _ in prefix]
        known = self._cached(prefix, len(prefix))
        _, already, theirs = self.tree.insert(self.tree.root, 0, key(*prefix), pages)
        assert (already, theirs) == (len(known), known)
        for n in range(already, len(prefix)):
            self.model[prefix[: n + 1]] = pages[n]

    @rule(target=handles, prefix=prefixes, cut=st.integers(0, 7))
    def match_and_lock(self, prefix: tuple[int, ...], cut: int) -> tuple[tuple[int, ...], Node]:
        limit = min(cut, len(prefix))
        expected = self._cached(prefix, limit)
        assert self.tree.peek(key(*prefix), limit) == len(expected)
        node, pages = self.tree.match(key(*prefix), limit)
        assert pages == expected
        self.tree.lock(node)
        handle = (prefix[: len(pages)], node)
        self.locked.append(handle)
        return handle

    @rule(handle=handles, more=prefixes)
    def grow_below_a_handle(self, handle: tuple[tuple[int, ...], Node], more: tuple[int, ...]) -> None:
        if handle not in self.locked:
            return
        prefix, node = handle
        whole = prefix + more
        pages = [next(self.fresh) for _ in whole]
        known = self._cached(whole, len(whole))
        _, already, theirs = self.tree.insert(node, len(prefix), key(*whole), pages)
        assert (already, theirs) == (len(known), known[len(prefix) :])
        for n in range(already, len(whole)):
            self.model[whole[: n + 1]] = pages[n]

    @rule(handle=consumes(handles))
    def unlock(self, handle: tuple[tuple[int, ...], Node]) -> None:
        self.locked.remove(handle)
        self.tree.unlock(handle[1])

    @rule(n=st.integers(1, 6))
    def evict(self, n: int) -> None:
        protected = {prefix[:i] for prefix, _ in self.locked for i in range(1, len(prefix) + 1)}
        free = len(self.model) - len(protected)
        gone = set(self.tree.evict(n))
        assert len(gone) == min(n, free)
        assert not gone & {self.model[p] for p in protected}, "a locked page was evicted"
        self.model = {p: page for p, page in self.model.items() if page not in gone}
        assert all(p[:-1] in self.model or len(p) == 1 for p in self.model), "a prefix lost its beginning"

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        self.tree.check_integrity()
        protected = {prefix[:i] for prefix, _ in self.locked for i in range(1, len(prefix) + 1)}
        assert self.tree.protected == len(protected)
        assert self.tree.evictable == len(self.model) - len(protected)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
