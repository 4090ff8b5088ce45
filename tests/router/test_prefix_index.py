"""The index against a naive model, and its table cases."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet_contract.prefix import chain_hashes, namespace_hash
from fleet_router.prefix_index import STRIDE, PrefixIndex

NS = namespace_hash("0011")


def keys(*pages: int) -> list[int]:
    """Chain keys of a prompt whose pages are named by numbers."""
    return chain_hashes([page for page in pages for _ in range(16)], NS)


def index_with(*slots: int, capacity: int = 10_000) -> PrefixIndex:
    index = PrefixIndex()
    for slot in slots:
        index.add_slot(slot, capacity)
    return index


def test_a_prompt_is_found_again_to_its_last_whole_page() -> None:
    index = index_with(0, 1)
    index.insert(0, keys(*range(7)))
    assert index.lookup(keys(*range(7))) == {0: 7 * 16}


def test_a_longer_prompt_finds_the_end_of_the_shorter_one_between_stored_pages() -> None:
    index = index_with(0)
    index.insert(0, keys(*range(6)))
    assert index.lookup(keys(*range(20))) == {0: 6 * 16}


def test_workers_leave_the_walk_one_by_one() -> None:
    index = index_with(0, 1, 2)
    index.insert(0, keys(*range(4)))
    index.insert(1, keys(*range(8)))
    index.insert(2, keys(*range(3)))
    assert index.lookup(keys(*range(12))) == {0: 64, 1: 128, 2: 48}


def test_another_prompt_shares_nothing_after_the_first_difference() -> None:
    index = index_with(0)
    index.insert(0, keys(1, 2, 3, 4, 5, 6, 7, 8))
    assert index.lookup(keys(9, 2, 3, 4, 5, 6, 7, 8)) == {}
    assert index.lookup(keys(1, 2, 3, 4, 9, 6, 7, 8)) == {0: 64}


def test_the_oldest_leaf_leaves_first_when_the_worker_is_full() -> None:
    index = index_with(0, capacity=128)
    index.insert(0, keys(*range(8)))
    index.insert(0, keys(50, 51, 52, 53))
    assert index.lookup(keys(*range(8))) == {0: 64}
    assert index.lookup(keys(50, 51, 52, 53)) == {0: 64}
    index.check_integrity()


def test_a_removed_worker_never_matches_again_and_its_slot_starts_empty() -> None:
    index = index_with(0, 1)
    index.insert(0, keys(*range(8)))
    index.remove_slot(0)
    index.add_slot(0, 1000)
    assert index.lookup(keys(*range(8))) == {}
    assert len(index) == 0


def test_a_wrong_prediction_shrinks_the_history_and_right_ones_let_it_grow_again() -> None:
    index = index_with(0, capacity=640)
    index.insert(0, keys(*range(40)))
    assert index.held_tokens(0) == 640
    index.feedback(0, 640, 0)
    assert index.held_tokens(0) == 576
    for _ in range(10):
        index.feedback(0, 64, 64)
    index.insert(0, keys(*range(40)))
    assert index.held_tokens(0) == 640
    index.check_integrity()


class NaiveIndex:
    """Per slot a list of (key, tokens), oldest first."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, list[tuple[int, int]]]] = {}

    def insert(self, slot: int, page_keys: list[int]) -> None:
        if slot not in self.slots:
            return
        capacity, held = self.slots[slot]
        n = len(page_keys)
        stored = [(page_keys[d - 1], 16 * (d % STRIDE or STRIDE)) for d in range(1, n + 1) if d % STRIDE == 0 or d == n]
        for entry in reversed(stored):
            held = [e for e in held if e[0] != entry[0]] + [next((e for e in held if e[0] == entry[0]), entry)]
        while sum(t for _, t in held) > capacity:
            held.pop(0)
        self.slots[slot] = (capacity, held)

    def lookup(self, page_keys: list[int]) -> dict[int, int]:
        out = {}
        for slot, (_, held) in self.slots.items():
            have = {k for k, _ in held}
            depth = 0
            while depth + STRIDE <= len(page_keys) and page_keys[depth + STRIDE - 1] in have:
                depth += STRIDE
            best = max([depth, *(d for d in range(depth + 1, min(depth + STRIDE, len(page_keys) + 1)) if page_keys[d - 1] in have)])
            if best:
                out[slot] = best * 16
        return out


prompts = st.lists(st.integers(0, 2), max_size=14).map(lambda pages: keys(*pages))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real, self.naive = PrefixIndex(), NaiveIndex()

    @rule(slot=st.integers(0, 3), capacity=st.integers(0, 500))
    def add(self, slot: int, capacity: int) -> None:
        if slot not in self.naive.slots:
            self.real.add_slot(slot, capacity)
            self.naive.slots[slot] = (capacity, [])

    @rule(slot=st.integers(0, 3))
    def remove(self, slot: int) -> None:
        self.real.remove_slot(slot)
        self.naive.slots.pop(slot, None)

    @rule(slot=st.integers(0, 3), prompt=prompts)
    def insert(self, slot: int, prompt: list[int]) -> None:
        self.real.insert(slot, prompt)
        self.naive.insert(slot, prompt)

    @rule(slot=st.integers(0, 3), prompt=prompts, at=st.integers(0, 13))
    def forget(self, slot: int, prompt: list[int], at: int) -> None:
        self.real.forget(slot, prompt[at:])
        if slot in self.naive.slots:
            capacity, held = self.naive.slots[slot]
            self.naive.slots[slot] = (capacity, [e for e in held if e[0] not in prompt[at:]])

    @rule(prompt=prompts)
    def lookup(self, prompt: list[int]) -> None:
        assert self.real.lookup(prompt) == self.naive.lookup(prompt)

    @invariant()
    def adds_up(self) -> None:
        self.real.check_integrity()


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexMachine: Any = IndexMachine.TestCase
