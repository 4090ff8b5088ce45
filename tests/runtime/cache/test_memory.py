"""The page ledger: allocator, tree and promises together, under random requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from fleet_runtime.cache import pages as owners
from fleet_runtime.cache.memory import KvMemory, Lease, pages_for
from fleet_runtime.cache.pages import FREE, REQUEST, TREE, PageAllocator

PAGE = 16


def key(*letters: int) -> bytes:
    return np.repeat(np.array(letters, dtype=np.int32), PAGE).tobytes()


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_are_rounded_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_a_page_given_by_the_wrong_owner_is_a_bug_that_shows() -> None:
    pages = PageAllocator(4)
    taken = pages.take(2)
    with pytest.raises(AssertionError, match="belongs to class"):
        pages.give(taken, old=TREE, new=FREE)
    with pytest.raises(AssertionError):
        pages.take(3)


def test_what_is_promised_cannot_be_promised_again() -> None:
    memory = KvMemory(8)
    first = memory.admit(key(1), prefix_pages=0, total_pages=5)
    assert first is not None and memory.headroom == 3
    assert memory.admit(key(2), prefix_pages=0, total_pages=4) is None
    second = memory.admit(key(2), prefix_pages=0, total_pages=3)
    assert second is not None and memory.headroom == 0
    memory.grow(first, 5)
    memory.grow(second, 3)
    memory.check_integrity([first, second])


def test_a_prefix_counts_as_free_until_it_is_locked() -> None:
    memory = KvMemory(4)
    lease = memory.admit(key(1, 2, 3, 4), prefix_pages=0, total_pages=4)
    assert lease is not None
    memory.grow(lease, 4)
    memory.commit(lease, key(1, 2, 3, 4))
    memory.release(lease)
    assert memory.headroom == 4 and memory.pages.count(owners.TREE) == 4
    hit = memory.admit(key(1, 2, 3, 4), prefix_pages=3, total_pages=4)
    assert hit is not None and hit.shared == 3 and memory.headroom == 0
    assert memory.admit(key(9), prefix_pages=0, total_pages=1) is None
    memory.grow(hit, 4)  # evicts page 4 of the tree
    memory.check_integrity([hit])
    memory.release(hit)
    with pytest.raises(AssertionError, match="ends once"):
        memory.release(hit)


def test_two_that_compute_the_same_prefix_end_with_one_copy() -> None:
    freed: list[int] = []
    memory = KvMemory(8, on_free=lambda pages: freed.extend(pages))
    a = memory.admit(key(1, 2), prefix_pages=2, total_pages=3)
    b = memory.admit(key(1, 2), prefix_pages=2, total_pages=3)
    assert a is not None and b is not None
    for lease in (a, b):
        memory.grow(lease, 2)
    own = b.own_pages()
    memory.commit(a, key(1, 2))
    memory.commit(b, key(1, 2))
    assert list(b.table[:2]) == list(a.table[:2]) and freed == own
    memory.check_integrity([a, b])


class MemoryMachine(RuleBasedStateMachine):
    """Requests come, grow, commit a part of their prompt and go, at random. Prompts are over three letters, so prefixes meet often."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: set[int] = set()
        self.memory = KvMemory(12, on_free=self.poisoned.update)
        self.leases: dict[int, tuple[Lease, tuple[int, ...]]] = {}

    @rule(target=live, prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), answer=st.integers(0, 3))
    def admit(self, prompt: tuple[int, ...], answer: int) -> int:
        before = self.memory.headroom
        lease = self.memory.admit(key(*prompt), prefix_pages=len(prompt) - 1, total_pages=len(prompt) + answer)
        if lease is None:
            assert self.memory.headroom == before
            return -1
        self.leases[id(lease)] = (lease, prompt)
        return id(lease)

    @rule(ref=live, data=st.data())
    def grow(self, ref: int, data: st.DataObject) -> None:
        if ref in self.leases:
            lease, _ = self.leases[ref]
            self.memory.grow(lease, data.draw(st.integers(lease.count, len(lease.table))))
            self.poisoned -= set(lease.table[: lease.count].tolist())
            assert len(set(lease.table[: lease.count].tolist())) == lease.count

    @rule(ref=live, data=st.data())
    def commit(self, ref: int, data: st.DataObject) -> None:
        if ref in self.leases:
            lease, prompt = self.leases[ref]
            whole = data.draw(st.integers(0, min(lease.count, len(prompt))))
            self.memory.commit(lease, key(*prompt[:whole]))

    @rule(ref=consumes(live))
    def release(self, ref: int) -> None:
        if ref in self.leases:
            self.memory.release(self.leases.pop(ref)[0])

    @invariant()
    def everything_adds_up(self) -> None:
        self.memory.check_integrity([lease for lease, _ in self.leases.values()])
        total = self.memory.pages.count(FREE) + self.memory.pages.count(TREE) + self.memory.pages.count(REQUEST)
        assert total == 12
        for lease, _ in self.leases.values():
            assert not self.poisoned & set(lease.table[: lease.count].tolist()), "a page in use was freed"


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
