"""The rules that a replay can compare: what each router does when a request comes, as functions of what it can see.

Facts about other routers are from their public sources: SGLang's cache_aware policy, the Gateway API Inference Extension's default
scorers 3:2:2, Dynamo's linear cost, LMetric's product, llm-d's affinity until saturation, AIBrix' prefix-cache policy, a consistent hash
ring with bounded loads. `sglang` and `aibrix` see a history of their own picks; the others see the workers' true caches and the picks
on their way.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fleet_router.replay.model import Job, Worker
from fleet_router.replay.trace import BLOCK_TOKENS, Request

SGLANG_ABS: Final = 32
SGLANG_REL: Final = 1.1
SGLANG_THRESHOLD: Final = 0.5
GAIE_WEIGHTS: Final = (3.0, 2.0, 2.0)  # prefix, queue, KV
STICKY_SHARE: Final = 0.8
STICKY_LIMIT_S: Final = 18.0
AIBRIX_IMBALANCE: Final = 8
RING_BOUND: Final = 1.25
_MASK: Final = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class View:
    """What a router knows of one worker."""

    worker: Worker
    history: OrderedDict[int, None] = field(default_factory=OrderedDict)
    on_their_way: dict[int, int] = field(default_factory=dict)  # blocks of picks without first token
    pending: int = 0  # uncached prompt tokens without first token
    inflight_tokens: int = 0
    requests: int = 0
    processed: int = 0
    shown_queue: int = 0  # of the last poll
    shown_kv: float = 0.0


class Baseline:
    """One of the other rules. The simulator calls `choose` and `took`, then `first_token` and `done` as they happen."""

    def __init__(self, name: str, workers: list[Worker], seed: int) -> None:
        self.name = name
        self.views = [View(w) for w in workers]
        self._choose = RULES[name]
        self.rng = random.Random(seed)
        self.turn = -1
        self._by_history = name in BY_HISTORY
        self._uses_hits = name in USES_HITS

    def hits(self, request: Request) -> list[int]:
        """Tokens of the prompt in each worker, as far as this rule can see."""
        return [self._hit(view, request) for view in self.views]

    def choose(self, request: Request) -> int:
        """The worker it goes to."""
        return self._choose(self, request, self.hits(request) if self._uses_hits else [])

    def took(self, job: Job, to: int) -> None:
        """Counts it."""
        view = self.views[to]
        job.estimated_miss = job.request.input_tokens - self._hit(view, job.request)
        view.pending += job.estimated_miss
        view.inflight_tokens += job.request.input_tokens
        view.requests += 1
        view.processed += 1
        history, way = view.history, view.on_their_way
        for block in reversed(job.request.blocks):
            if self._by_history:
                history[block] = None
                history.move_to_end(block)
            else:
                way[block] = way.get(block, 0) + 1
        while len(history) > view.worker.capacity_blocks:
            history.popitem(last=False)

    def first_token(self, job: Job) -> None:
        """Its prompt is computed."""
        view = self.views[job.worker]
        view.pending -= job.estimated_miss
        if not self._by_history:
            way = view.on_their_way
            for block in job.request.blocks:
                if way[block] == 1:
                    del way[block]
                else:
                    way[block] -= 1

    def done(self, job: Job) -> None:
        """It has its answer."""
        view = self.views[job.worker]
        view.requests -= 1
        view.inflight_tokens -= job.request.input_tokens

    def poll(self) -> None:
        """The metrics that workers publish."""
        for view in self.views:
            view.shown_queue = len(view.worker.waiting)
            view.shown_kv = view.worker.kv_share

    def least(self, costs: list[float], slack: float = 1e-9) -> int:
        """One of the cheapest, at random."""
        limit = min(costs) + slack
        near = [n for n, cost in enumerate(costs) if cost <= limit]
        return near[0] if len(near) == 1 else self.rng.choice(near)

    def _hit(self, view: View, request: Request) -> int:
        depth = 0
        if self._by_history:
            for block in request.blocks:
                if block not in view.history:
                    break
                depth += 1
        else:
            present, way = view.worker.blocks, view.on_their_way
            for block in request.blocks:
                if block not in present and block not in way:
                    break
                depth += 1
        return min(request.input_tokens, depth * BLOCK_TOKENS)


def _round_robin(b: Baseline, request: Request, hits: list[int]) -> int:
    b.turn = (b.turn + 1) % len(b.views)
    return b.turn


def _least_tokens(b: Baseline, request: Request, hits: list[int]) -> int:
    return b.least([v.pending for v in b.views], 0.0)


def _sglang(b: Baseline, request: Request, hits: list[int]) -> int:
    """Shortest queue when loads are far apart, else the longest prefix if it is half of the prompt."""
    loads = [v.requests for v in b.views]
    shortest = min(range(len(loads)), key=lambda n: (loads[n], b.views[n].processed))
    if max(loads) - min(loads) > SGLANG_ABS and max(loads) > SGLANG_REL * min(loads):
        return shortest
    best = max(range(len(hits)), key=hits.__getitem__)
    return best if hits[best] > SGLANG_THRESHOLD * request.input_tokens else shortest


def _gaie(b: Baseline, request: Request, hits: list[int]) -> int:
    """Weighted sum of prefix share, queue and KV scores, from polled metrics."""
    prefix, queue, kv = GAIE_WEIGHTS
    lengths = [v.shown_queue for v in b.views]
    most, span = max(lengths), max(lengths) - min(lengths)
    scores = [
        prefix * hit / request.input_tokens + queue * ((most - v.shown_queue) / span if span else 1.0) + kv * (1.0 - v.shown_kv)
        for v, hit in zip(b.views, hits, strict=True)
    ]
    return b.least([-s for s in scores])


def _dynamo(b: Baseline, request: Request, hits: list[int]) -> int:
    """Blocks to compute plus blocks in use."""
    return b.least(
        [max(0.0, (v.pending + request.input_tokens - hit) / BLOCK_TOKENS) + v.inflight_tokens / BLOCK_TOKENS
         for v, hit in zip(b.views, hits, strict=True)]
    )  # fmt: skip


def _lmetric(b: Baseline, request: Request, hits: list[int]) -> int:
    """Tokens to compute times requests."""
    return b.least([(v.pending + request.input_tokens - hit) * (v.requests + 1.0) for v, hit in zip(b.views, hits, strict=True)])


def _sticky(b: Baseline, request: Request, hits: list[int]) -> int:
    """Only workers with most of the prefix, unless they are far behind; of these the least tokens."""
    views = b.views
    among = [n for n, hit in enumerate(hits) if hit >= STICKY_SHARE * request.input_tokens]
    if among:
        behind = min(views[n].pending for n in among) - min(v.pending for v in views)
        if behind / views[0].worker.tokens_per_s > STICKY_LIMIT_S:
            among = []
    among = among or list(range(len(views)))
    return min(among, key=lambda n: views[n].pending + request.input_tokens - hits[n] + 1e-6 * b.rng.random())


def _aibrix(b: Baseline, request: Request, hits: list[int]) -> int:
    """Longest prefix among workers that are not overloaded; else fewest requests."""
    loads = [v.requests for v in b.views]
    mean = sum(loads) / len(loads)
    deviation = max(0.0, sum(x * x for x in loads) / len(loads) - mean * mean) ** 0.5
    even = max(loads) - min(loads) <= AIBRIX_IMBALANCE
    among = [n for n, load in enumerate(loads) if even or load == min(loads)]
    for n in sorted(among, key=lambda n: (-hits[n], loads[n])):
        if hits[n] > 0 and loads[n] <= mean + deviation:
            return n
    return min(range(len(loads)), key=loads.__getitem__)


def _mix(z: int) -> int:
    z = (z ^ (z >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    z = (z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return z ^ (z >> 33)


def _ring(b: Baseline, request: Request, hits: list[int]) -> int:
    """The first worker after the hash of the prompt's first block that is not over 1.25x the mean."""
    point = _mix(request.blocks[0] * 0x9E3779B97F4A7C15 & _MASK)
    limit = RING_BOUND * (sum(v.requests for v in b.views) + 1) / len(b.views) + 1
    order = sorted(range(len(b.views)), key=lambda n: _mix((point ^ (n * 0x9E3779B97F4A7C15 + 12345)) & _MASK))
    return next((n for n in order if b.views[n].requests + 1 <= limit), order[0])


RULES: Final[dict[str, Callable[[Baseline, Request, list[int]], int]]] = {
    "round-robin": _round_robin,
    "least-tokens": _least_tokens,
    "sglang": _sglang,
    "gaie": _gaie,
    "dynamo": _dynamo,
    "lmetric": _lmetric,
    "sticky": _sticky,
    "aibrix": _aibrix,
    "hash-ring": _ring,
}
BY_HISTORY: Final = ("sglang", "aibrix")
USES_HITS: Final = ("sglang", "gaie", "dynamo", "lmetric", "sticky", "aibrix")
SEVEN: Final = ("round-robin", "least-tokens", "sglang", "gaie", "dynamo", "lmetric", "sticky")
