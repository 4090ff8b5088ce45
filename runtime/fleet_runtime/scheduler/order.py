"""Order of the waiting requests under --schedule-policy. Called by the loop when rows are free.

Requests that were retracted come first, whatever the policy: they ran before. fcfs: by arrival. priority: more is sooner, then by arrival.
lpm: longest cached prefix first. dfs-weight: walks the prefix tree, heaviest branch first, so that requests that share a prefix run
together. The last two look at the tree once for each waiting request, so a long queue falls back to arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import KvMemory
from fleet_runtime.scheduler.request import Request

MOST_LOOKUPS: Final = 128  # requests that the tree is asked about in one choice
_KEY_BYTES: Final = 4 * PAGE_SIZE

Order = Callable[[Sequence[Request], KvMemory], list[Request]]


def fcfs(waiting: Sequence[Request], memory: KvMemory) -> list[Request]:
    """As they stand in the queue: by arrival, the retracted in front."""
    return list(waiting)


def by_priority(waiting: Sequence[Request], memory: KvMemory) -> list[Request]:
    """More is sooner."""
    return sorted(waiting, key=lambda r: (not r.retractions, -r.admit.priority, r.arrived))


def longest_prefix(waiting: Sequence[Request], memory: KvMemory) -> list[Request]:
    """Most cached tokens first."""
    if len(waiting) > MOST_LOOKUPS:
        return fcfs(waiting, memory)
    return sorted(waiting, key=lambda r: (not r.retractions, -_cached_pages(r, memory), r.arrived))


def heaviest_branch(waiting: Sequence[Request], memory: KvMemory) -> list[Request]:
    """Depth first over the cached prefixes of the waiting requests, the branch with most requests first; within one, by arrival."""
    if len(waiting) > MOST_LOOKUPS:
        return fcfs(waiting, memory)
    path = {r: _branch(r, _cached_pages(r, memory)) for r in waiting}
    weight = Counter(node for nodes in path.values() for node in nodes)
    first: dict[int, float] = {}
    for request, nodes in path.items():
        first |= {node: min(request.arrived, first.get(node, request.arrived)) for node in nodes}

    def place(request: Request) -> tuple[bool, list[tuple[int, float, int]], float]:
        # At each depth: heavier branches first, then older ones. Who ends at a node comes after those below it: their prefix is longer.
        return (not request.retractions, [*((-weight[node], first[node], node) for node in path[request]), (1, 0.0, 0)], request.arrived)

    return sorted(waiting, key=place)


def _branch(request: Request, pages: int) -> list[int]:
    """Names of the nodes on the way to its cached prefix: a hash of each page and all before it."""
    key, name, out = request.ids[: pages * PAGE_SIZE].tobytes(), hash(request.namespace), list[int]()
    for at in range(0, len(key), _KEY_BYTES):
        name = hash((name, key[at : at + _KEY_BYTES]))
        out.append(name)
    return out


def _cached_pages(request: Request, memory: KvMemory) -> int:
    return memory.peek(request.ids[: request.length].tobytes(), request.prefix_limit, request.namespace)


ORDERS: Final[dict[str, Order]] = {"fcfs": fcfs, "priority": by_priority, "lpm": longest_prefix, "dfs-weight": heaviest_branch}
