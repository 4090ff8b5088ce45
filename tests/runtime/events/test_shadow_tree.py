"""Rule: the events of any run, replayed into a shadow tree, give the real tree. No sockets: the queue between the two threads, in any timing."""

from __future__ import annotations

import itertools
import random
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_contract.kv_events import EventBatch, encode_batch
from fleet_runtime.cache import events
from fleet_runtime.cache.events import wire_batches
from fleet_runtime.cache.radix import EVICTION_POLICIES, Node, RadixTree, namespace_of
from fleet_runtime.events.handover import Handover, Snapshot, Step
from fleet_testing.kv_reader import Shadow

PAGE = 16
EPOCH = 7


def key(*letters: int) -> bytes:
    return np.repeat(np.array(letters, dtype=np.int32), PAGE).tobytes()


def blocks_of(tree: RadixTree) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """What a perfect shadow of the tree holds."""
    out = {}
    for run in tree.runs():
        parent = run.parent
        for i, h in enumerate(run.hashes):
            out[h] = (parent, tuple(np.frombuffer(run.key, dtype=np.int32)[i * PAGE : (i + 1) * PAGE].tolist()))
            parent = h
    return out


class Run:
    """A tree that changes at random, a scheduler that publishes now and then, and a sender that is fast or slow as it likes."""

    SPACES = (namespace_of("", ""), namespace_of("adapter", ""), namespace_of("", "salt"), namespace_of("adapter", "salt"))
    WEIGHTS: Final = {"insert": 30, "match_and_lock": 8, "unlock": 8, "evict": 12, "publish": 25, "send": 14, "snapshot": 2, "clear": 1}

    def __init__(self, seed: int, eviction: str, max_blocks: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.tree = RadixTree(eviction)
        self.handover = Handover(self.tree, "model", max_blocks=max_blocks, clock=lambda: self.now)
        self.shadow = Shadow()
        self.fresh = itertools.count()
        self.locked: list[Node] = []

    def go(self, steps: int) -> Run:
        for operation in self.rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()), k=steps):
            getattr(self, operation)()
        for _ in range(3):  # the scheduler's loop goes on, also when it is idle
            self.publish()
            self._drain()
        self.tree.check_integrity()
        assert self.shadow.blocks == blocks_of(self.tree)
        self.handover.close()
        return self

    def _prefix(self) -> list[int]:
        return [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 7))]

    def insert(self) -> None:
        prefix = self._prefix()
        pages = [next(self.fresh) for _ in prefix]
        self.tree.insert(self.tree.root, 0, key(*prefix), pages, self.rng.choice(self.SPACES), self.rng.randrange(3))

    def match_and_lock(self) -> None:
        prefix = self._prefix()
        node, _ = self.tree.match(key(*prefix), self.rng.randrange(len(prefix) + 1), self.rng.choice(self.SPACES))  # splits
        self.tree.lock(node)
        self.locked.append(node)

    def unlock(self) -> None:
        if self.locked:
            self.tree.unlock(self.locked.pop(self.rng.randrange(len(self.locked))))

    def evict(self) -> None:
        self.tree.evict(self.rng.randrange(1, 6))

    def clear(self) -> None:
        self.tree.clear()

    def publish(self) -> None:
        self.handover.publish()

    def send(self) -> None:
        self._drain(self.rng.randrange(1, 6))

    def snapshot(self) -> None:
        self.now += 1
        self.handover.want_snapshot()

    def _drain(self, n: int = 1 << 30) -> None:
        self.handover.calm()
        for _ in range(n):
            item = self.handover.take()
            match item:
                case None:
                    return
                case Step():
                    self._apply(self.shadow, item.changes)
                case Snapshot():  # holds what the stream up to here has told
                    other = Shadow()
                    self._apply(other, item.runs)
                    assert other.blocks == self.shadow.blocks
            self.handover.sent(item)

    def _apply(self, shadow: Shadow, changes: object) -> None:
        for batch in wire_batches(changes, EPOCH):  # type: ignore[arg-type]
            shadow.apply(encode_batch(EventBatch(0.0, batch)))


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_the_events_of_any_run_give_the_real_tree(eviction: str) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        Run(seed, eviction, max_blocks=1 << 16).go(150)

    check()


def test_they_do_so_when_the_queue_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of three blocks, a queue of eight: runs are cut, and the stream starts over again and again."""
    monkeypatch.setattr(events, "MAX_BATCH_BLOCKS", 3)
    assert sum(Run(seed, "lru", max_blocks=8).go(150).handover.restarts for seed in range(40)) > 40


def test_a_burst_past_the_bound_starts_the_stream_over_and_loses_nothing() -> None:
    tree = RadixTree()
    handover = Handover(tree, "model", max_blocks=10)
    shadow = Shadow()
    for letter in range(40):
        tree.insert(tree.root, 0, key(letter, 1), [2 * letter, 2 * letter + 1])
        handover.publish()
    sent = []
    while (item := handover.take()) is not None:
        sent.append(item)
        handover.sent(item)
    assert len(sent) == 5, "the queue holds ten blocks and no more"
    handover.publish()  # caught up: starts over
    last = handover.take()
    assert isinstance(last, Step) and handover.restarts == 1
    for item in [*sent, last]:
        for batch in wire_batches(item.changes, EPOCH):  # type: ignore[union-attr]
            shadow.apply(encode_batch(EventBatch(0.0, batch)))
    assert shadow.blocks == blocks_of(tree) and len(shadow.blocks) == 80
    handover.close()


def test_one_step_larger_than_the_bound_is_handed_over_whole_when_nothing_waits() -> None:
    tree = RadixTree()
    handover = Handover(tree, "model", max_blocks=10)
    tree.insert(tree.root, 0, key(*range(30)), list(range(30)))
    handover.publish()
    assert isinstance(handover.take(), Step) and handover.restarts == 0
    handover.close()


def test_a_radix_node_is_one_event_and_a_long_one_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = RadixTree()
    handover = Handover(tree, "model")
    tree.insert(tree.root, 0, key(*range(9)), list(range(9)))
    handover.publish()
    step = handover.take()
    assert isinstance(step, Step)
    (batch,) = wire_batches(step.changes, EPOCH)
    assert len(batch) == 1
    monkeypatch.setattr(events, "MAX_BATCH_BLOCKS", 4)
    cut = [event for batch in wire_batches(step.changes, EPOCH) for event in batch]
    assert [len(e.block_hashes) for e in cut] == [4, 4, 1] and [e.base_block_idx for e in cut] == [0, 4, 8]  # type: ignore[union-attr]
    handover.close()


def test_snapshots_cost_the_scheduler_a_bounded_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often readers ask, the tree is walked at most every 0.2 s."""
    now = [0.0]
    tree = RadixTree()
    handover = Handover(tree, "model", clock=lambda: now[0])
    walks = 0
    runs = tree.runs

    def counted() -> object:
        nonlocal walks
        walks += 1
        return runs()

    monkeypatch.setattr(tree, "runs", counted)
    for _ in range(1000):
        handover.want_snapshot()
        handover.publish()
        now[0] += 0.001
    assert walks == 5
    handover.close()
