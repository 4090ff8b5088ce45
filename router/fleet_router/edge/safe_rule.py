"""What an edge chooses while there is no brain: affinity by a hash, load by its own count. Pure.

Of the two candidates with the fewest of this edge's requests, the one that the prompt's first blocks hash to (rendezvous hashing: all
edges agree, and a worker that comes or goes moves only its own share). Equal counts are told apart by the same hash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import xxhash

from fleet_contract import names
from fleet_router.table import WorkerView

FIRST_BLOCKS: Final = 4


def choose(
    ready: Collection[WorkerView], keys: Sequence[int], busy: Callable[[WorkerView], int], alone: Collection[str] = ()
) -> tuple[WorkerView, WorkerView | None] | None:
    """The worker that answers, and the prefill worker of a pair.

    Args:
        ready: routable workers of one revision.
        keys: chain hashes of the prompt's blocks.
        busy: how many requests of this edge a worker has.
        alone: if given, the roles that can answer by themselves; then nobody answers with a partner.
    Returns:
        None when nobody can serve.
    """
    if alone:
        worker = _best([w for w in ready if w.record.role in alone], keys, busy)
        return (worker, None) if worker is not None else None
    decodes = [w for w in ready if w.record.role == names.ROLE_DECODE]
    firsts = [w for w in ready if w.record.role == names.ROLE_UNIFIED or (w.record.role == names.ROLE_PREFILL and partners(w, decodes))]
    first = _best(firsts, keys, busy)
    if first is None:
        return None
    if first.record.role == names.ROLE_UNIFIED:
        return first, None
    decode = _best(partners(first, decodes), keys, busy)
    assert decode is not None
    return decode, first


def partners(prefill: WorkerView, decodes: Collection[WorkerView]) -> list[WorkerView]:
    """Decode workers that a prefill worker can hand over to."""
    own = set(prefill.record.transfer_backends)
    return [d for d in decodes if not own or not d.record.transfer_backends or not own.isdisjoint(d.record.transfer_backends)]


def _best(workers: Collection[WorkerView], keys: Sequence[int], busy: Callable[[WorkerView], int]) -> WorkerView | None:
    key = keys[min(FIRST_BLOCKS, len(keys)) - 1] if keys else 0
    ranked = sorted((busy(w), -_score(key, w), w.identity) for w in workers)[:2]
    if not ranked:
        return None
    chosen = min(ranked, key=lambda r: r[1])[2] if keys else ranked[0][2]
    return next(w for w in workers if w.identity == chosen)


def _score(key: int, worker: WorkerView) -> int:
    uid, rank, incarnation = worker.identity
    return xxhash.xxh3_64_intdigest(f"{key:x} {uid} {rank} {incarnation}".encode())
