"""Changes of the prefix tree, collected step by step, and what of them goes on the wire.

`ChangeLog` is the tree's listener, in the scheduler's thread: it only keeps references. `wire_batches` makes events of them, in the
publisher's thread. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fleet_contract.kv_events import MEDIUM_DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, Event
from fleet_contract.names import PAGE_SIZE
from fleet_contract.prefix import namespace_hash
from fleet_runtime.cache.radix import PAGE_KEY_BYTES, Run, names_of

MAX_BATCH_BLOCKS: Final = 4096  # of one message: some 300 KB


@dataclass(frozen=True, slots=True)
class Gone:
    """Pages that the tree no longer holds."""

    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Emptied:
    """The tree holds nothing any more."""


Change = Run | Gone | Emptied
EMPTIED: Final = Emptied()


def blocks_of(change: Change) -> int:
    """Blocks that a change names; at least one, so that no number of changes is free."""
    return 1 if isinstance(change, Emptied) else max(1, len(change.hashes))


class ChangeLog:
    """The tree's listener: all changes since the last `take`, in order."""

    def __init__(self, model_revision: str) -> None:
        self._model_revision = model_revision
        self._changes: list[Change] = []

    def root_hash(self, namespace: bytes) -> int:
        return namespace_hash(self._model_revision, *names_of(namespace))

    def stored(self, run: Run) -> None:
        self._changes.append(run)

    def removed(self, hashes: Sequence[int]) -> None:
        self._changes.append(Gone(hashes))

    def cleared(self) -> None:
        self._changes.append(EMPTIED)

    def take(self) -> list[Change]:
        """The changes, each given out once."""
        if not self._changes:
            return []
        out, self._changes = self._changes, []
        return out


def wire_batches(changes: Iterable[Change], epoch: int) -> Iterator[list[Event]]:
    """The changes as events, in batches of at most MAX_BATCH_BLOCKS blocks."""
    batch: list[Event] = []
    room = MAX_BATCH_BLOCKS
    for change in changes:
        for piece in _pieces(change):
            if (size := blocks_of(piece)) > room:
                yield batch
                batch, room = [], MAX_BATCH_BLOCKS
            batch.append(_event(piece, epoch))
            room -= size
    if batch:
        yield batch


def _pieces(change: Change) -> Iterator[Change]:
    """A change, cut to what fits in one message."""
    if blocks_of(change) <= MAX_BATCH_BLOCKS:
        yield change
        return
    assert not isinstance(change, Emptied)
    for at in range(0, len(change.hashes), MAX_BATCH_BLOCKS):
        hashes = change.hashes[at : at + MAX_BATCH_BLOCKS]
        if isinstance(change, Gone):
            yield Gone(hashes)
        else:
            key = change.key[at * PAGE_KEY_BYTES : (at + len(hashes)) * PAGE_KEY_BYTES]
            yield Run(change.namespace, change.base + at, change.hashes[at - 1] if at else change.parent, key, hashes)


def _event(change: Change, epoch: int) -> Event:
    match change:
        case Emptied():
            return AllBlocksCleared(epoch=epoch)
        case Gone():
            return BlockRemoved(block_hashes=list(change.hashes), medium=MEDIUM_DEVICE, epoch=epoch)
        case Run():
            hashes = list(change.hashes)
            lora, salt = names_of(change.namespace)
            return BlockStored(
                block_hashes=hashes,
                parent_block_hash=change.parent,
                token_ids=np.frombuffer(change.key, dtype=np.uint32).tolist(),
                block_size=PAGE_SIZE,
                medium=MEDIUM_DEVICE,
                lora_name=lora or None,
                extra_keys=_extra_keys(lora, salt, change) if lora or salt else None,
                seq_hashes=hashes,
                base_block_idx=change.base,
                cache_salt=salt or None,
                epoch=epoch,
            )


def _extra_keys(lora: str, salt: str, run: Run) -> list[list[str] | None]:
    """As in vLLM: the LoRA's name in each block, the salt in the first block of a prompt, in this order."""
    each = [lora] if lora else None
    keys: list[list[str] | None] = [each] * len(run.hashes)
    if salt and run.base == 0:
        keys[0] = [*(each or []), salt]
    return keys
