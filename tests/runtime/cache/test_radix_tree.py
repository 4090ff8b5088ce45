"""The prefix tree against a naive model: a set of page-wise prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from fleet_contract.prefix import chain_hashes, namespace_hash
from fleet_runtime.cache.radix import EVICTION_POLICIES, Node, RadixTree, Run, names_of, namespace_of

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


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_a_namespace_names_one_pair_of_lora_and_salt(a: tuple[str, str], b: tuple[str, str]) -> None:
    assert (namespace_of(*a) == namespace_of(*b)) == (a == b)
    assert names_of(namespace_of(*a)) == a


def test_two_namespaces_whose_names_begin_alike_share_nothing() -> None:
    tree = RadixTree()
    zeros = np.zeros(PAGE, dtype=np.int32).tobytes()
    for n, namespace in enumerate((b"", b"\0", b"\0" * 65, namespace_of("a", ""), namespace_of("", "a"), namespace_of("a", "\0"))):
        assert tree.match(zeros * 2, 2, namespace)[1] == []
        tree.insert(tree.root, 0, zeros * 2, [2 * n, 2 * n + 1], namespace)
        assert tree.match(zeros * 2, 2, namespace)[1] == [2 * n, 2 * n + 1]
    tree.check_integrity()


def _tree_of_three(eviction: str) -> RadixTree:
    """Prefixes 1, 2, 3, inserted in that order; 2 has priority 5, 3 has 1; 1 was used by two requests, 3 by one; 2 was looked at last."""
    tree = RadixTree(eviction)
    for letter, priority in ((1, 0), (2, 5), (3, 1)):
        tree.insert(tree.root, 0, key(letter), [letter], priority=priority)
    for letter, uses in ((3, 1), (1, 2), (2, 0)):
        node, _ = tree.match(key(letter), 1)
        for _ in range(uses):
            tree.use(node)
    return tree


@pytest.mark.parametrize(("eviction", "order"), [("lru", [3, 1, 2]), ("lfu", [2, 3, 1]), ("fifo", [1, 2, 3]), ("priority", [1, 3, 2])])
def test_each_policy_has_its_order(eviction: str, order: list[int]) -> None:
    tree = _tree_of_three(eviction)
    tree.check_integrity()
    assert [tree.evict(1)[0] for _ in range(3)] == order
    assert tree.evict(1) == []


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(AssertionError, match="random"):
        RadixTree("random")


def test_among_equals_the_longest_unused_goes_first() -> None:
    for eviction in ("lfu", "priority"):
        tree = RadixTree(eviction)
        for letter in (1, 2, 3):
            tree.insert(tree.root, 0, key(letter), [letter])
        tree.match(key(1), 1)
        assert tree.evict(3) == [2, 3, 1]


def test_a_prefix_that_an_urgent_request_extends_becomes_as_urgent() -> None:
    tree = RadixTree("priority")
    tree.insert(tree.root, 0, key(1), [1])
    tree.insert(tree.root, 0, key(2), [2], priority=3)
    node, _, _ = tree.insert(tree.root, 0, key(1, 4), [1, 4], priority=9)
    tree.insert(node, 2, key(1, 4, 5), [1, 4, 5], priority=7)
    assert tree.evict(4) == [2, 5, 4, 1]


def test_what_is_looked_at_but_not_used_is_no_hit() -> None:
    """A request that waits at the head of the queue is matched at each step; counted as hits, it would outrank all others."""
    tree = RadixTree("lfu")
    tree.insert(tree.root, 0, key(1), [1])
    tree.insert(tree.root, 0, key(2), [2])
    tree.use(tree.match(key(1), 1)[0])
    for _ in range(100):
        tree.match(key(2), 1)
    assert tree.evict(1) == [2]


def test_clearing_gives_back_all_that_no_request_holds() -> None:
    tree = RadixTree()
    node, _, _ = tree.insert(tree.root, 0, key(1, 2), [1, 2])
    tree.insert(tree.root, 0, key(1, 3), [1, 4])
    tree.insert(tree.root, 0, key(5), [5])
    tree.lock(node)
    assert sorted(tree.clear()) == [4, 5]
    tree.check_integrity()
    assert tree.match(key(1, 2), 2)[1] == [1, 2]
    tree.unlock(node)
    assert sorted(tree.clear()) == [1, 2]
    assert tree.clear() == [] and tree.evictable == 0
    tree.check_integrity()
    tree.insert(tree.root, 0, key(1, 2), [7, 8])
    assert tree.match(key(1, 2), 2)[1] == [7, 8]
    tree.check_integrity()


@pytest.mark.parametrize("damage", ["locks", "counts", "order"])
def test_a_damaged_tree_is_rebuilt_from_its_nodes_and_the_live_handles(damage: str) -> None:
    tree = RadixTree("lfu")
    held, _, _ = tree.insert(tree.root, 0, key(1, 2), [1, 2])
    tree.lock(held)
    tree.insert(tree.root, 0, key(1, 3), [9, 3])
    gone, _, _ = tree.insert(tree.root, 0, key(4), [4])
    if damage == "locks":
        tree.lock(gone)  # a handle that nobody has any more
    elif damage == "counts":
        tree.evictable += 1
    else:
        tree._order.clear()
    if damage != "locks":
        with pytest.raises(AssertionError):
            tree.check_integrity()
    tree.rebuild([held])
    tree.check_integrity()
    assert (tree.protected, tree.evictable) == (2, 2) and sorted(tree.evict(9)) == [3, 4]


def test_a_reset_drops_what_is_locked_too_and_says_so() -> None:
    log = Log()
    tree = RadixTree(listener=log)
    node, _, _ = tree.insert(tree.root, 0, key(1, 2), [1, 2])
    tree.lock(node)
    assert sorted(tree.reset()) == [1, 2] and not log.held
    tree.check_integrity()
    assert tree.evictable == tree.protected == 0


class Log:
    """A listener that keeps every change, and a second tree's worth of hashes: what a reader of the changes would hold."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.runs: list[Run] = []

    def root_hash(self, namespace: bytes) -> int:
        return namespace_hash("model", *names_of(namespace))

    def stored(self, run: Run) -> None:
        assert (run.parent is None) == (run.base == 0) and (run.parent is None or run.parent in self.held), "a run without its beginning"
        assert not self.held & set(run.hashes), "stored twice"
        self.held |= set(run.hashes)
        self.runs.append(run)

    def removed(self, hashes: Sequence[int]) -> None:
        assert hashes and len(set(hashes)) == len(hashes) and set(hashes) <= self.held, "removed what was not there"
        self.held -= set(hashes)

    def cleared(self) -> None:
        self.held = set()


def test_a_run_carries_the_chain_hashes_of_its_prefix() -> None:
    log = Log()
    tree = RadixTree(listener=log)
    space = namespace_of("adapter", "salt")
    tree.insert(tree.root, 0, key(1, 2), [1, 2], space)
    tree.insert(tree.root, 0, key(1, 3, 4), [9, 3, 4], space)
    ids = np.frombuffer(key(1, 3, 4), dtype=np.int32).tolist()
    hashes = chain_hashes(ids, namespace_hash("model", "adapter", "salt"))
    second = log.runs[1]
    assert (second.base, second.parent, list(second.hashes), second.key) == (1, hashes[0], hashes[1:], key(3, 4))
    tree.check_integrity()


def test_only_an_empty_tree_takes_a_listener() -> None:
    tree = RadixTree()
    tree.listen(Log())
    tree.insert(tree.root, 0, key(1), [1])
    with pytest.raises(AssertionError, match="every page"):
        tree.listen(Log())


def test_an_eviction_looks_at_nothing_that_stays() -> None:
    """10,000 leaves, each used again since it was made: an order that is mended only when it is asked would mend all of them now."""
    tree = RadixTree()
    for i in range(10_000):
        tree.insert(tree.root, 0, key(i), [i])
    for i in range(10_000):
        tree.match(key(i), 1)
    calls = 0
    place = tree._place

    def counted(node: Node) -> None:
        nonlocal calls
        calls += 1
        place(node)

    tree._place = counted  # type: ignore[method-assign]
    assert tree.evict(3) == [0, 1, 2]
    assert calls == 6  # each that went, and its parent


Prefix = tuple[int, ...]


@dataclass
class Cached:
    """What the model knows of one page."""

    page: int
    made: int
    used: int
    hits: int
    priority: int

    def rank(self, eviction: str) -> tuple[int, int]:
        return {"lru": 0, "lfu": self.hits, "fifo": self.made, "priority": self.priority}[eviction], self.used


class TreeMachine(RuleBasedStateMachine):
    """Random inserts, matches, uses, locks, evictions and clears; the model maps every cached prefix (a tuple of a namespace and letters) to
    its last page, and knows no nodes. It says exactly which pages an eviction takes."""

    eviction = "lru"
    handles = Bundle("handles")
    prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
    spaces = st.sampled_from([b"", namespace_of("a", ""), namespace_of("", "a")])

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.tree = RadixTree(self.eviction, self.log)
        self.model: dict[tuple[bytes, Prefix], Cached] = {}
        self.locked: list[tuple[bytes, Prefix, Node]] = []
        self.fresh = itertools.count()
        self.now = 0

    def _cached(self, space: bytes, prefix: Prefix, limit: int) -> list[int]:
        names = ((space, prefix[:n]) for n in range(1, limit + 1))
        return [self.model[name].page for name in itertools.takewhile(self.model.__contains__, names)]

    def _used(self, space: bytes, prefix: Prefix, *, hits: int = 0, priority: int = 0) -> None:
        self.now += 1
        for n in range(1, len(prefix) + 1):
            cached = self.model[space, prefix[:n]]
            cached.used = self.now
            cached.hits += hits
            cached.priority = max(cached.priority, priority)

    def _inserted(self, space: bytes, prefix: Prefix, pages: list[int], already: int, priority: int) -> None:
        for n in range(already, len(prefix)):
            self.model[space, prefix[: n + 1]] = Cached(pages[n], self.now + 1, 0, 0, 0)
        self._used(space, prefix, priority=priority)

    @rule(space=spaces, prefix=prefixes, priority=st.integers(0, 2))
    def insert(self, space: bytes, prefix: Prefix, priority: int) -> None:
        pages = [next(self.fresh) for _ in prefix]
        known = self._cached(space, prefix, len(prefix))
        _, already, theirs = self.tree.insert(self.tree.root, 0, key(*prefix), pages, space, priority)
        assert (already, theirs) == (len(known), known)
        self._inserted(space, prefix, pages, already, priority)

    @rule(target=handles, space=spaces, prefix=prefixes, cut=st.integers(0, 7), used=st.booleans())
    def match_and_lock(self, space: bytes, prefix: Prefix, cut: int, used: bool) -> tuple[bytes, Prefix, Node]:
        limit = min(cut, len(prefix))
        expected = self._cached(space, prefix, limit)
        assert self.tree.peek(key(*prefix), limit, space) == len(expected)
        node, pages = self.tree.match(key(*prefix), limit, space)
        assert pages == expected
        self.tree.lock(node)
        if used:
            self.tree.use(node)
        handle = (space, prefix[: len(pages)], node)
        self._used(space, handle[1], hits=int(used))
        self.locked.append(handle)
        return handle

    @rule(handle=handles, more=prefixes, priority=st.integers(0, 2))
    def grow_below_a_handle(self, handle: tuple[bytes, Prefix, Node], more: Prefix, priority: int) -> None:
        if handle not in self.locked:
            return
        space, prefix, node = handle
        whole = prefix + more
        pages = [next(self.fresh) for _ in whole]
        known = self._cached(space, whole, len(whole))
        _, already, theirs = self.tree.insert(node, len(prefix), key(*whole), pages, space, priority)
        assert (already, theirs) == (len(known), known[len(prefix) :])
        self._inserted(space, whole, pages, already, priority)

    @rule(handle=consumes(handles))
    def unlock(self, handle: tuple[bytes, Prefix, Node]) -> None:
        self.locked.remove(handle)
        self.tree.unlock(handle[2])
        self._used(*handle[:2])

    def _protected(self) -> set[tuple[bytes, Prefix]]:
        return {(space, prefix[:i]) for space, prefix, _ in self.locked for i in range(1, len(prefix) + 1)}

    @rule(n=st.integers(1, 6))
    def evict(self, n: int) -> None:
        protected = self._protected()
        expected = []
        for _ in range(n):
            parents = {(space, prefix[:-1]) for space, prefix in self.model}
            leaves = [name for name in self.model if name not in parents and name not in protected]
            if not leaves:
                break
            first = min(leaves, key=lambda name: self.model[name].rank(self.eviction))
            expected.append(self.model.pop(first).page)
        gone = self.tree.evict(n)
        assert sorted(gone) == sorted(expected)

    @rule()
    def clear(self) -> None:
        protected = self._protected()
        expected = sorted(cached.page for name, cached in self.model.items() if name not in protected)
        assert sorted(self.tree.clear()) == expected
        self.model = {name: cached for name, cached in self.model.items() if name in protected}

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        self.tree.check_integrity()
        protected = self._protected()
        assert self.tree.protected == len(protected)
        assert self.tree.evictable == len(self.model) - len(protected)
        held = {h for run in self.tree.runs() for h in run.hashes}
        assert held == self.log.held and len(held) == len(self.model)


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_the_tree_does_what_a_naive_model_does(eviction: str) -> None:
    machine = type(f"{eviction}Machine", (TreeMachine,), {"eviction": eviction})
    run_state_machine_as_test(machine, settings=settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True))
