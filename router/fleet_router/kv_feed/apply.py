"""Writes the events of one worker into the index, in pieces that cost about a millisecond each. Pure: the caller gives the time.

Own keys: ours come with the event (`seq_hashes`); for other engines they are computed from the tokens, since engines' hashes mean nothing
to anybody else. An event that cannot be used costs only itself and a count by its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fleet_contract.kv_events import Batch, Cleared, Removed, Stored, epoch_of
from fleet_contract.names import ENGINE_OURS, PAGE_SIZE
from fleet_contract.prefix import namespace_hash
from fleet_contract.worker import WorkerRecord
from fleet_router.decide import events
from fleet_router.decide.events import EventBook
from fleet_router.decide.index import PrefixIndex
from fleet_router.decide.lives import DISK, GPU, HOST

PIECE_BLOCKS: Final = 512
_TIERS: Final = {"GPU": GPU, "CPU": HOST, "CPU_TIER1": HOST, "CPU_TIER2": DISK, "DISK": DISK, "STORAGE": DISK}  # words of vLLM, SGLang, RFC 1527
_FULL_ATTENTION: Final = (None, "full_attention", "mla_attention")

# Why an event was not used. A closed set: it labels a counter.
UNDECODABLE, MEDIUM, GROUP, OPAQUE, RANK, ORPHAN = "unreadable", "medium", "group", "opaque", "rank", "orphan"
REASONS: Final = (UNDECODABLE, MEDIUM, GROUP, OPAQUE, RANK, ORPHAN, events.UNKNOWN, events.MALFORMED, events.UNSUPPORTED, events.DROPPED)


class Content:
    """One worker's content of the index, as `follow.Content`. `era` changes whenever what events are written to changes."""

    def __init__(self, index: PrefixIndex, book: EventBook, slot: int) -> None:
        self._index = index
        self._book = book
        self.slot = slot
        self.era = 0

    def begin(self) -> None:
        self.era += 1
        self._book.forget(self.slot)
        self._index.begin_snapshot(self.slot)

    def commit(self) -> None:
        self.era += 1
        self._index.commit_snapshot(self.slot)

    def drop(self) -> None:
        self.era += 1
        self._book.forget(self.slot)
        self._index.drop_snapshot(self.slot)

    def forget(self) -> None:
        self.era += 1
        self._book.forget(self.slot)
        self._index.set_by_history(self.slot, by_history=True)

    def doubt(self, *, doubted: bool) -> None:
        self._index.set_doubted(self.slot, doubted=doubted)


class Writer:
    """Events of one incarnation of a worker. `bad(reason)` is told of each event that is not used."""

    def __init__(self, book: EventBook, slot: int, record: WorkerRecord, bad: Callable[[str], None]) -> None:
        self._book = book
        self._slot = slot
        self._rank = record.rank
        self._model_revision = record.model_revision
        self._bad = bad
        self.epoch = epoch_of(record.incarnation) if tells_epochs(record) else None
        self.overflow = False  # more blocks than the worker has: the stream is wrong

    def is_of_another_life(self, batch: Batch) -> bool:
        """It tells of another incarnation than the one we know."""
        return self.epoch is not None and any(e.epoch is not None and e.epoch != self.epoch for e in batch.events)

    def write(self, batch: Batch, now: float) -> Iterator[None]:
        """Applies a batch; each step is one piece of it. After an overflow it ends."""
        for _ in batch.faults:
            self._bad(UNDECODABLE)
        if batch.rank is not None and batch.rank != self._rank:
            self._bad(RANK)
            return
        for event in batch.events:
            match event:
                case Cleared():
                    self._book.clear(self._slot)
                case Removed():
                    yield from self._remove(event)
                case Stored():
                    yield from self._store(event, now)
            if self.overflow:
                return

    def _remove(self, event: Removed) -> Iterator[None]:
        tier = _tier(event.medium)
        if tier is None:
            self._bad(MEDIUM)
            return
        for at in range(0, len(event.hashes), PIECE_BLOCKS):
            self._book.remove(self._slot, tier, event.group or 0, event.hashes[at : at + PIECE_BLOCKS])
            yield

    def _store(self, event: Stored, now: float) -> Iterator[None]:
        tier, chains = _tier(event.medium), _own_chains(event)
        if tier is None:
            self._bad(MEDIUM)
        elif event.spec_kind not in _FULL_ATTENTION or event.sliding_window is not None:
            self._bad(GROUP)  # its blocks say nothing about how long a prefix is cached
        elif event.opaque and not chains:
            self._bad(OPAQUE)
        elif event.tokens and not event.placeable and not chains:
            self._bad(events.MALFORMED)
        else:
            for piece in self._pieces(event, tier, chains):
                outcome = self._book.store(self._slot, piece, now)
                if outcome == events.OVERFLOW:
                    self.overflow = True
                    return
                if outcome not in (events.STORED, events.WAITING):
                    self._bad(outcome)
                yield

    def _pieces(self, event: Stored, tier: int, chains: Sequence[int]) -> Iterator[events.Stored]:
        size, namespace = event.block_size, namespace_hash(self._model_revision, event.lora, event.salt)
        parent = event.parent
        for at in range(0, len(event.hashes), PIECE_BLOCKS):
            to = at + PIECE_BLOCKS
            hashes = event.hashes[at:to]
            tokens = () if chains else event.tokens[at * size : to * size]
            yield events.Stored(tier, event.group or 0, hashes, parent, size, namespace, tokens, chains[at:to])
            parent = hashes[-1]


def tells_epochs(record: WorkerRecord) -> bool:
    """It is our runtime: its events name the incarnation, its topic the pod. The incarnations of other engines are made by the router."""
    return record.engine == ENGINE_OURS and bool(record.incarnation)


def _own_chains(event: Stored) -> Sequence[int]:
    """The keys that our runtime sends, one per block of a page."""
    return event.seq_hashes if event.block_size == PAGE_SIZE else ()


def _tier(medium: str | None) -> int | None:
    return GPU if medium is None else _TIERS.get(medium.upper())
