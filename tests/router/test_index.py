"""The index against a naive model, and its table cases (R1, R2, R5-R8). Keys are made by the contract's own chain hash."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet_contract.prefix import chain_hashes, namespace_hash
from fleet_router.decide import events
from fleet_router.decide.events import EventBook, Stored
from fleet_router.decide.history import History
from fleet_router.decide.index import SETTLE_S, PrefixIndex, StoreResult
from fleet_router.decide.keys import BLOCK_TOKENS, STRIDE
from fleet_router.decide.lives import DISK, GPU, HOST

NS = namespace_hash("0011")


def tokens(*blocks: int, each: int = BLOCK_TOKENS) -> list[int]:
    """A prompt whose blocks are named by numbers."""
    return [block for block in blocks for _ in range(each)]


def keys(*blocks: int, namespace: int = NS) -> list[int]:
    return chain_hashes(tokens(*blocks), namespace)[STRIDE - 1 :: STRIDE]


def by_history(*slots: int, capacity_blocks: int = 1000) -> PrefixIndex:
    index = PrefixIndex()
    for slot in slots:
        index.add_slot(slot, capacity_blocks * BLOCK_TOKENS, by_history=True)
    return index


def by_events(*slots: int, engine_blocks: int = 10_000) -> PrefixIndex:
    index = PrefixIndex()
    for slot in slots:
        index.add_slot(slot, 1 << 20, by_history=False, engine_blocks=engine_blocks)
    return index


def depth(index: PrefixIndex, slot: int, prompt: list[int], tier: int = GPU) -> int:
    """Blocks that a lookup promises for one worker."""
    gpu, host, disk = index.hits(prompt, 16)
    few = index.few_hits(prompt, 16)
    if few is not None:
        assert few == gpu.tolist()
    else:
        assert host is not None or index.is_told or index._doubted
    found = gpu[slot] + (host[slot] if tier >= HOST and host is not None else 0) + (disk[slot] if tier >= DISK and disk is not None else 0)
    return int(found) // BLOCK_TOKENS


def store_blocks(index: PrefixIndex, slot: int, prompt: list[int], tier: int = GPU, group: int = 0) -> None:
    """Engine blocks of 64 tokens; the engine's hash is the key plus one, so that nobody mixes them up."""
    for n, key in enumerate(prompt, 1):
        index.store(slot, tier, group, key ^ 1, key, n * STRIDE)


# -- lookups


@pytest.mark.rule("R1")
def test_r1_prompts_share_nothing_after_their_first_difference() -> None:
    index = by_history(0)
    index.remember(0, keys(1, 2, 3, 4))
    assert depth(index, 0, keys(1, 2, 9, 4)) == 2
    assert depth(index, 0, keys(9, 2, 3, 4)) == 0


@pytest.mark.rule("R2")
def test_r2_another_salt_or_lora_shares_nothing() -> None:
    index = by_history(0)
    index.remember(0, keys(1, 2, 3))
    for other in (namespace_hash("0011", "lora"), namespace_hash("0011", "", "salt"), namespace_hash("0012")):
        assert depth(index, 0, keys(1, 2, 3, namespace=other)) == 0


def test_workers_leave_the_walk_one_by_one() -> None:
    index = by_history(0, 1, 2, 3)
    for slot, n in ((0, 4), (1, 8), (2, 3), (3, 8)):
        index.remember(slot, keys(*range(n)))
    assert index.runs(keys(*range(12))) == [(0b0100, 3), (0b0001, 4), (0b1010, 8)]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 31, 64, 200])
def test_galloping_finds_every_depth(n: int) -> None:
    prompt = keys(*range(200))
    index = by_history(0, 1)
    index.remember(0, prompt[:n])
    index.remember(1, prompt)
    assert depth(index, 0, prompt) == n and depth(index, 1, prompt) == 200


def test_the_walk_over_one_worker_s_bit_sees_gaps() -> None:
    index = by_events(0)
    prompt = keys(1, 2, 3)
    for n in (1, 3):
        index.store(0, GPU, 0, n, prompt[n - 1], n * STRIDE)
    assert index.hit_blocks(0, prompt) == 1


# -- KV events


@pytest.mark.rule("R6")
def test_r6_a_block_that_was_stored_twice_is_there_until_it_is_removed_twice() -> None:
    index = by_events(0)
    prompt = keys(1)
    assert index.store(0, GPU, 0, 7, prompt[0], STRIDE) == StoreResult.STORED
    assert index.store(0, GPU, 0, 7, prompt[0], STRIDE) == StoreResult.REPEATED
    assert index.remove(0, GPU, 0, 7) and depth(index, 0, prompt) == 1
    assert index.remove(0, GPU, 0, 7) and depth(index, 0, prompt) == 0
    assert not index.remove(0, GPU, 0, 7)
    index.check_integrity()


@pytest.mark.rule("R6")
def test_r6_a_copy_in_host_memory_survives_the_removal_from_the_gpu() -> None:
    index = by_events(0)
    prompt = keys(1, 2)
    store_blocks(index, 0, prompt)
    store_blocks(index, 0, prompt, HOST)
    for key in prompt:
        index.remove(0, GPU, 0, key ^ 1)
    assert depth(index, 0, prompt) == 0 and depth(index, 0, prompt, HOST) == 2


@pytest.mark.rule("R6")
def test_r6_groups_are_counted_apart() -> None:
    index = by_events(0)
    prompt = keys(1)
    store_blocks(index, 0, prompt, group=0)
    store_blocks(index, 0, prompt, group=1)
    index.remove(0, GPU, 0, prompt[0] ^ 1)
    assert depth(index, 0, prompt) == 1


def test_a_hit_may_continue_in_slower_tiers() -> None:
    index = by_events(0)
    prompt = keys(*range(6))
    store_blocks(index, 0, prompt[:2])
    for n, tier in ((3, HOST), (4, HOST), (5, DISK)):
        index.store(0, tier, 0, n, prompt[n - 1], n * STRIDE)
    assert [int(v[0]) // BLOCK_TOKENS for v in index.hits(prompt, 1) if v is not None] == [2, 2, 1]


@pytest.mark.rule("R8")
def test_r8_more_blocks_than_the_worker_can_have_are_refused() -> None:
    index = by_events(0, engine_blocks=10)
    prompt = keys(*range(40))
    outcomes = Counter(index.store(0, GPU, 0, n, key, n * STRIDE) for n, key in enumerate(prompt, 1))
    assert outcomes == {StoreResult.STORED: 16, StoreResult.OVERFLOW: 24}
    index.clear(0)
    assert depth(index, 0, prompt) == 0 and index.store(0, GPU, 0, 1, prompt[0], STRIDE) == StoreResult.STORED


def test_a_snapshot_takes_the_place_of_the_old_content_at_once() -> None:
    index = by_history(0)
    old, new = keys(1, 2), keys(3, 4)
    index.remember(0, old)
    index.begin_snapshot(0)
    store_blocks(index, 0, new)
    index.check_integrity()
    assert (depth(index, 0, old), depth(index, 0, new)) == (2, 0)
    index.commit_snapshot(0)
    assert (depth(index, 0, old), depth(index, 0, new)) == (0, 2)
    assert not index.is_by_history(0)
    while index.sweep(1):
        index.check_integrity()
    index.check_integrity()
    assert len(index) == 2


@pytest.mark.rule("R4")
def test_r4_a_worker_that_lost_its_stream_starts_from_nothing_in_history_mode() -> None:
    index = by_events(0)
    store_blocks(index, 0, keys(1, 2))
    index.set_by_history(0, by_history=True)
    assert depth(index, 0, keys(1, 2)) == 0
    index.remember(0, keys(1, 2))
    assert depth(index, 0, keys(1, 2)) == 2


# -- lives


@pytest.mark.rule("R7")
def test_r7_nothing_of_a_removed_worker_matches_in_its_slot_s_next_life() -> None:
    index = by_history(0, 1)
    index.remember(0, keys(1, 2))
    index.remember(1, keys(1, 2, 3))
    index.remove_slot(0)
    assert index.runs(keys(1, 2)) == [(0b10, 2)]
    index.add_slot(0, 64_000, by_history=True)
    assert depth(index, 0, keys(1, 2)) == 0
    index.check_integrity()
    assert index.sweep(1)  # more is left: the old life's bit stays taken
    index.add_slot(2, 64_000, by_history=True)
    assert depth(index, 2, keys(1, 2)) == 0
    while index.sweep():
        pass
    index.check_integrity()
    assert len(index) == 3


@pytest.mark.rule("R7")
def test_r7_removal_costs_the_same_however_much_the_worker_held() -> None:
    index = by_history(0, capacity_blocks=100_000)
    for n in range(100):
        index.remember(0, keys(n, *range(100, 150)))
    before = len(index)
    index.remove_slot(0)
    assert len(index) == before  # nothing was walked yet
    while index.sweep(1000):
        pass
    assert len(index) == 0


@pytest.mark.rule("R7")
def test_r7_an_expectation_of_an_old_life_changes_nothing_in_the_new_one() -> None:
    index = by_events(0)
    old = index.expect(0, keys(1, 2), 0)
    assert old is not None
    index.clear(0)
    new = index.expect(0, keys(1, 2), 0)
    assert new is not None
    index.cancel(old)
    assert depth(index, 0, keys(1, 2)) == 2
    index.cancel(new)
    while index.sweep():
        pass
    index.check_integrity()
    assert len(index) == 0


# -- expectations


def test_a_pick_is_expected_until_its_events_had_time_to_come() -> None:
    index = by_events(0)
    prompt = keys(1, 2, 3)
    store_blocks(index, 0, prompt[:1])
    expectation = index.expect(0, prompt, 1)
    assert expectation is not None and depth(index, 0, prompt) == 3
    index.settle(expectation, 10.0)
    index.expire(10.0 + SETTLE_S / 2)
    assert depth(index, 0, prompt) == 3
    store_blocks(index, 0, prompt)
    index.expire(10.0 + SETTLE_S)
    assert depth(index, 0, prompt) == 3  # the events hold it now
    index.check_integrity()


def test_a_pick_that_failed_is_expected_no_more() -> None:
    index = by_events(0)
    expectation = index.expect(0, keys(1, 2), 0)
    assert expectation is not None
    index.cancel(expectation)
    index.cancel(expectation)
    assert depth(index, 0, keys(1, 2)) == 0 and len(index) == 0


# -- history


def test_the_oldest_leaf_leaves_first_when_the_worker_is_full() -> None:
    index = by_history(0, capacity_blocks=4)
    index.remember(0, keys(1, 2, 3))
    index.remember(0, keys(1, 8))
    index.remember(0, keys(1, 9))
    assert [depth(index, 0, keys(*p)) for p in ((1, 2, 3), (1, 8), (1, 9))] == [2, 2, 2]
    index.check_integrity()


def test_a_wrong_prediction_shrinks_the_history_and_right_ones_let_it_grow_again() -> None:
    index = by_history(0, capacity_blocks=10)
    prompt = keys(*range(10))
    index.remember(0, prompt)
    index.feedback(0, 640, 0)
    assert index.held_tokens(0) == 9 * BLOCK_TOKENS
    for _ in range(10):
        index.feedback(0, 64, 64)
    index.remember(0, prompt)
    assert index.held_tokens(0) == 10 * BLOCK_TOKENS
    index.check_integrity()


class NaiveHistory:
    """Per block the time of its last use; evicts the leaf that was used longest ago."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[tuple[int, ...], int] = {}
        self.now = 0

    def use(self, prompt: tuple[int, ...]) -> None:
        self.now += 1
        for n in range(1, len(prompt) + 1):
            self.used[prompt[:n]] = self.now
        while len(self.used) > self.capacity:
            parents = {p[:-1] for p in self.used}
            del self.used[min((p for p in self.used if p not in parents), key=lambda p: self.used[p])]


class HistoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.naive = NaiveHistory(9)
        self.held: set[int] = set()
        self.names: dict[tuple[int, ...], int] = {}
        self.real = History(9, self.held.add, self.held.remove)

    @rule(prompt=st.lists(st.integers(0, 2), max_size=7).map(tuple))
    def use(self, prompt: tuple[int, ...]) -> None:
        for n in range(1, len(prompt) + 1):
            self.names.setdefault(prompt[:n], len(self.names))
        self.real.use([self.names[prompt[:n]] for n in range(1, len(prompt) + 1)])
        self.naive.use(prompt)

    @invariant()
    def both_hold_the_same(self) -> None:
        self.real.check_integrity()
        assert self.held == {self.names[p] for p in self.naive.used}


HistoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHistoryMachine: Any = HistoryMachine.TestCase


# -- the whole index against a naive model


class NaiveIndex:
    """Sets and counters only."""

    def __init__(self) -> None:
        self.refs: dict[int, Counter[tuple[int, int, int]]] = {}  # slot -> (tier, group, engine hash)
        self.keys: dict[int, int] = {}  # engine hash -> key
        self.expected: dict[int, list[list[int]]] = {}

    def holds(self, slot: int, key: int, tier: int) -> bool:
        stored = any(n and t <= tier and self.keys[h] == key for (t, _, h), n in self.refs[slot].items())
        return stored or any(key in e for e in self.expected[slot])

    def depth(self, slot: int, prompt: list[int], tier: int) -> int:
        return next((n for n, key in enumerate(prompt) if not self.holds(slot, key, tier)), len(prompt))


PROMPTS = [keys(*p) for p in ((0,), (0, 1), (0, 1, 2), (0, 1, 3), (4, 5), (4, 5, 6, 7, 8))]
SLOTS = st.integers(0, 2)
NAMES = (1 << 64) - 1


class IndexMachine(RuleBasedStateMachine):
    """Events keep prefixes whole, as engines do: a prompt is stored from its root, and removed from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.naive = PrefixIndex(), NaiveIndex()
        self.in_bytes: dict[int, set[int]] = {}  # slot -> keys of bytes; they share the table with the others
        self.open: list[tuple[int, Any, list[int]]] = []

    @rule(slot=SLOTS)
    def add(self, slot: int) -> None:
        if slot not in self.naive.refs:
            self.real.add_slot(slot, 1 << 20, by_history=False, engine_blocks=1000)
            self.naive.refs[slot], self.naive.expected[slot] = Counter(), []

    @rule(slot=SLOTS)
    def remove_worker(self, slot: int) -> None:
        self.real.remove_slot(slot)
        self.naive.refs.pop(slot, None)
        self.naive.expected.pop(slot, None)
        self.in_bytes.pop(slot, None)
        self.open = [o for o in self.open if o[0] != slot]

    @rule(slot=SLOTS)
    def clear(self, slot: int) -> None:
        self.real.clear(slot)
        self.in_bytes.pop(slot, None)
        if slot in self.naive.refs:
            self.naive.refs[slot], self.naive.expected[slot] = Counter(), []
            self.open = [o for o in self.open if o[0] != slot]

    @rule(slot=SLOTS, prompt=st.sampled_from(PROMPTS), tier=st.integers(0, 2), group=st.integers(0, 1))
    def store(self, slot: int, prompt: list[int], tier: int, group: int) -> None:
        for n, key in enumerate(prompt, 1):
            self.naive.keys[key ^ 1] = key
            self.real.store(slot, tier, group, key ^ 1, key, n * STRIDE)
            if slot in self.naive.refs:
                self.naive.refs[slot][(tier, group, key ^ 1)] += 1

    @rule(slot=SLOTS, prompt=st.sampled_from(PROMPTS), tier=st.integers(0, 2), group=st.integers(0, 1))
    def remove(self, slot: int, prompt: list[int], tier: int, group: int) -> None:
        refs = self.naive.refs.get(slot, Counter())
        if all(refs[(tier, group, key ^ 1)] for key in prompt):
            for key in reversed(prompt):
                below = [p for p in PROMPTS if key in p and p[-1] != key]
                if refs[(tier, group, key ^ 1)] == 1 and any(refs[(tier, group, p[p.index(key) + 1] ^ 1)] for p in below):
                    return  # an engine drops leaves first
                assert self.real.remove(slot, tier, group, key ^ 1)
                refs[(tier, group, key ^ 1)] -= 1

    @rule(slot=SLOTS, prompt=st.sampled_from(PROMPTS))
    def expect(self, slot: int, prompt: list[int]) -> None:
        if slot in self.naive.refs:
            hit = self.naive.depth(slot, prompt, GPU)
            found = self.real.expect(slot, prompt, hit)
            if found is not None:
                self.naive.expected[slot].append(prompt[hit:])
                self.open.append((slot, found, prompt[hit:]))

    @rule(slot=SLOTS, prompt=st.sampled_from(PROMPTS), key_tokens=st.sampled_from([40.0, 64.0]))
    def expect_bytes(self, slot: int, prompt: list[int], key_tokens: float) -> None:
        assert self.real.expect(slot, [~key & NAMES for key in prompt], 0, key_tokens) is None
        if slot in self.naive.refs:
            self.in_bytes.setdefault(slot, set()).update(~key & NAMES for key in prompt)

    @rule(prompt=st.sampled_from(PROMPTS))
    def look_up_bytes(self, prompt: list[int]) -> None:
        gpu, _, _ = self.real.hits([~key & NAMES for key in prompt], 3, 50.0)
        assert gpu.tolist() == [50.0 * sum(~key & NAMES in self.in_bytes.get(slot, ()) for key in prompt) for slot in range(3)]

    @rule()
    def cancel_last(self) -> None:
        if self.open:
            slot, expectation, blocks = self.open.pop()
            self.real.cancel(expectation)
            self.naive.expected[slot].remove(blocks)

    @rule(budget=st.integers(1, 6))
    def sweep(self, budget: int) -> None:
        self.real.sweep(budget)

    @invariant()
    def agrees(self) -> None:
        self.real.check_integrity()
        for prompt in PROMPTS:
            for slot in self.naive.refs:
                assert self.real.hit_blocks(slot, prompt) == self.naive.depth(slot, prompt, GPU)

    @rule(prompt=st.sampled_from(PROMPTS))
    def look_up(self, prompt: list[int]) -> None:
        """Exact where every worker's blocks are whole prefixes; else never less than the walk."""
        gpu, _, _ = self.real.hits(prompt, 4)
        for slot in self.naive.refs:
            assert int(gpu[slot]) // BLOCK_TOKENS >= self.naive.depth(slot, prompt, GPU)
            held = [self.naive.holds(slot, key, GPU) for key in prompt]
            if held == sorted(held, reverse=True):
                assert int(gpu[slot]) // BLOCK_TOKENS == sum(held)
        for slot in set(range(4)) - self.naive.refs.keys():
            assert gpu[slot] == 0


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexMachine: Any = IndexMachine.TestCase


# -- events with tokens


def event(*blocks: int, parent: int | None = None, first: int = 100, block_size: int = 16, **more: Any) -> Stored:
    """Engine blocks named first, first+1, ...; each block's tokens are its number."""
    ids = [b for b in blocks for _ in range(block_size)]
    return Stored(GPU, 0, [first + n for n in range(len(blocks))], parent, block_size, NS, ids)._replace(**more)


def test_events_of_16_token_blocks_are_placed_by_their_parents() -> None:
    index = by_events(0)
    book = EventBook(index)
    ids = [n // 16 for n in range(12 * 16)]
    assert book.store(0, event(*range(6)), 0.0) == events.STORED
    assert book.store(0, event(*range(6, 12), parent=105, first=106), 0.0) == events.STORED
    assert depth(index, 0, chain_hashes(ids, NS)[STRIDE - 1 :: STRIDE]) == 3
    index.check_integrity()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_engine_block_size_gives_the_same_keys(block_size: int) -> None:
    index = by_events(0)
    ids = list(range(512))
    hashes = list(range(512 // block_size))
    assert EventBook(index).store(0, Stored(GPU, 0, hashes, None, block_size, NS, ids), 0.0) == events.STORED
    assert depth(index, 0, chain_hashes(ids, NS)[STRIDE - 1 :: STRIDE]) == 8
    EventBook(index).remove(0, GPU, 0, hashes)
    index.check_integrity()
    assert len(index) == 0


def test_chains_that_the_engine_sends_need_no_tokens() -> None:
    index = by_events(0)
    ids = list(range(128))
    chains = chain_hashes(ids, NS)
    assert EventBook(index).store(0, Stored(GPU, 0, list(range(8)), None, 16, NS, (), chains), 0.0) == events.STORED
    assert depth(index, 0, chains[STRIDE - 1 :: STRIDE]) == 2


def test_an_event_that_comes_before_its_parent_waits_for_it() -> None:
    index = by_events(0)
    book = EventBook(index)
    assert book.store(0, event(8, 9, 10, 11, parent=107, first=108), 0.0) == events.WAITING
    assert book.store(0, event(4, 5, 6, 7, parent=103, first=104), 0.0) == events.WAITING
    assert book.store(0, event(0, 1, 2, 3), 0.0) == events.STORED
    assert book.waiting(0) == 0
    assert depth(index, 0, chain_hashes([n // 16 for n in range(192)], NS)[STRIDE - 1 :: STRIDE]) == 3


def test_orphans_are_bounded_and_do_not_wait_for_ever() -> None:
    book = EventBook(by_events(0))
    outcomes = Counter(book.store(0, event(1, parent=10**6 + n, first=n), 0.0) for n in range(events.MAX_WAITING + 5))
    assert outcomes == {events.WAITING: events.MAX_WAITING, events.DROPPED: 5}
    assert book.expire(events.WAITING_LIFE_S - 1) == 0
    assert book.expire(events.WAITING_LIFE_S) == events.MAX_WAITING and book.waiting(0) == 0


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [
        (event(1)._replace(token_ids=[1] * 17), events.MALFORMED),
        (event(1)._replace(block_size=1), events.UNSUPPORTED),
        (event(1)._replace(block_size=0), events.UNSUPPORTED),
        (event(1)._replace(token_ids=()), events.UNKNOWN),
        (event(1)._replace(chains=[1, 2]), events.MALFORMED),
    ],
    ids=["overlapping tokens", "page size 1", "page size 0", "a copy of what nobody knows", "wrong number of chains"],
)
@pytest.mark.rule("R5")
def test_r5_an_event_that_cannot_be_used_costs_only_itself(bad: Stored, outcome: str) -> None:
    index = by_events(0)
    book = EventBook(index)
    assert book.store(0, bad, 0.0) == outcome
    assert book.store(0, event(0, 1, 2, 3), 0.0) == events.STORED
    index.check_integrity()


def test_a_copy_without_tokens_is_found_by_its_hashes() -> None:
    index = by_events(0)
    book = EventBook(index)
    book.store(0, event(0, 1, 2, 3), 0.0)
    assert book.store(0, Stored(HOST, 0, [100, 101, 102, 103], None, 16, NS), 0.0) == events.STORED
    assert book.remove(0, GPU, 0, [100, 101, 102, 103]) == 4
    prompt = chain_hashes([n // 16 for n in range(64)], NS)[STRIDE - 1 :: STRIDE]
    assert (depth(index, 0, prompt), depth(index, 0, prompt, HOST)) == (0, 1)


# -- memory


@pytest.mark.parametrize("kind", ["events", "history"])
@pytest.mark.rule("R8")
def test_r8_a_worker_s_block_costs_at_most_200_bytes(kind: str) -> None:
    n = 60_000
    index = by_history(0, capacity_blocks=n) if kind == "history" else by_events(0, engine_blocks=n)
    prompt = keys(1)
    tracemalloc.start()
    try:
        made = [hash((n, "key")) & (1 << 64) - 1 for n in range(n)]
        if kind == "history":
            for at in range(0, n, 200):
                index.remember(0, made[at : at + 200])
        else:
            for at, key in enumerate(made):
                index.store(0, GPU, 0, key ^ 1, key, at + 1)
        del made
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used <= 200 * n, used / n
    assert depth(index, 0, prompt) == 0


@pytest.mark.rule("R8")
def test_r8_after_everything_is_removed_nothing_is_left() -> None:
    index = by_events(0, 1)
    for n in range(300):
        store_blocks(index, n % 2, keys(n % 7, n % 5, n % 3))
    index.remove_slot(0)
    index.clear(1)
    while index.sweep(50):
        index.check_integrity()
    index.check_integrity()
    assert len(index) == 0
