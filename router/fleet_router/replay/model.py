"""The model of one worker: steps of decodes and prompt chunks, and a block cache with pinned blocks. Deterministic, no randomness.

A step takes 15 ms + prompt tokens / speed + 50 us per decode + 27 ns per token of context, and computes up to 8,192 prompt tokens first
come, first served: roughly a 70B model on four H100s. A request starts when prompt and answer fit beside what is pinned; blocks leave
least recently used, leaves first. Engine-side reordering, transfer and network are left out: it ranks rules, it predicts no numbers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fleet_router.replay.trace import BLOCK_TOKENS, Request

STEP_S: Final = 0.015
STEP_PER_ROW_S: Final = 5e-5
STEP_PER_CTX_TOKEN_S: Final = 2.7e-8
CHUNK_TOKENS: Final = 8192
MAX_PREFILLING: Final = 64


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the model. Times in seconds."""

    number: int
    request: Request
    arrived: float
    worker: int = -1
    hit_tokens: int = 0
    pinned_blocks: int = 0  # of the prompt, at its start
    reserved: int = 0  # blocks promised beside the pinned ones
    prompt_left: int = 0
    estimated_miss: int = 0  # by the rule that chose
    first_token: float = -1.0
    done: float = -1.0


@dataclass(slots=True, eq=False)
class Ended:
    """What a step brought: first tokens, then ends, in order."""

    finished: list[Job] = field(default_factory=list)
    first_tokens: list[Job] = field(default_factory=list)


class Worker:
    """See the module. `on_hold(block)` and `on_drop(block)` are told of the cache's changes, as KV events would."""

    def __init__(self, capacity_blocks: int, tokens_per_s: float) -> None:
        self.capacity_blocks = capacity_blocks
        self.tokens_per_s = tokens_per_s
        self.on_hold: Callable[[int], None] | None = None
        self.on_drop: Callable[[int], None] | None = None
        self.blocks: dict[int, int] = {}  # present -> how many requests hold it
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.busy = False
        self.computed_tokens = 0
        self.reserved = 0
        self.pinned = 0
        self.steps = 0
        self._free: OrderedDict[int, None] = OrderedDict()  # present, held by nobody, oldest first
        self._ends: list[tuple[int, int, Job]] = []  # (step, order of start, job)
        self._starts = 0
        self._context = 0
        self._chunks: list[tuple[Job, int]] = []

    @property
    def running(self) -> int:
        return len(self._ends)

    @property
    def kv_share(self) -> float:
        """Of the cache, what requests hold."""
        return min(1.0, (self.pinned + self.reserved) / self.capacity_blocks)

    def begin_step(self) -> float | None:
        """Admits what fits and plans a step; returns its length, None when there is nothing to do."""
        self._admit()
        if not self.prefilling and not self._ends:
            self.busy = False
            return None
        self.busy = True
        left, chunks = CHUNK_TOKENS, []
        for job in self.prefilling:
            if left <= 0:
                break
            part = min(left, job.prompt_left)
            chunks.append((job, part))
            left -= part
        self._chunks = chunks
        used = CHUNK_TOKENS - left
        self.computed_tokens += used
        return STEP_S + used / self.tokens_per_s + STEP_PER_ROW_S * len(self._ends) + STEP_PER_CTX_TOKEN_S * self._context

    def end_step(self, now: float) -> Ended:
        """The planned step is over."""
        self.steps += 1
        self._context += len(self._ends)
        ended = Ended()
        while self._ends and self._ends[0][0] <= self.steps:
            job = heapq.heappop(self._ends)[2]
            self._context -= job.request.input_tokens + job.request.output_tokens - 1
            self._finish(job, now)
            ended.finished.append(job)
        for job, part in self._chunks:
            job.prompt_left -= part
        while self.prefilling and self.prefilling[0].prompt_left <= 0:
            job = self.prefilling.popleft()
            job.first_token = now
            ended.first_tokens.append(job)
            new = job.request.blocks[job.pinned_blocks :]
            for block in new:
                self._pin(block)
            self.reserved -= len(new)
            job.reserved -= len(new)
            self._shrink()
            if job.request.output_tokens <= 1:
                self._finish(job, now)
                ended.finished.append(job)
            else:
                self._starts += 1
                heapq.heappush(self._ends, (self.steps + job.request.output_tokens - 1, self._starts, job))
                self._context += job.request.input_tokens
        self._shrink()
        return ended

    def _admit(self) -> None:
        while self.waiting and len(self.prefilling) < MAX_PREFILLING:
            job = self.waiting[0]
            request, blocks = job.request, self.blocks
            hit = 0
            for block in request.blocks:
                if block not in blocks:
                    break
                hit += 1
            beyond = max(0, -(-(request.input_tokens + request.output_tokens) // BLOCK_TOKENS) - len(request.blocks))
            needed = sum(not blocks.get(block) for block in request.blocks) + beyond
            if self.pinned + self.reserved + needed > self.capacity_blocks and (self.prefilling or self._ends):
                return  # one that is larger than the cache starts when it is alone
            self.waiting.popleft()
            job.hit_tokens = min(hit * BLOCK_TOKENS, request.input_tokens - 1)
            job.pinned_blocks = hit
            for block in request.blocks[:hit]:
                self._pin(block)
            job.reserved = beyond + len(request.blocks) - hit
            self.reserved += job.reserved
            self._shrink()
            job.prompt_left = request.input_tokens - job.hit_tokens
            self.prefilling.append(job)

    def _finish(self, job: Job, now: float) -> None:
        job.done = now
        self.reserved -= job.reserved
        for block in reversed(job.request.blocks):  # the leaf becomes free first, and leaves first
            held = self.blocks[block] - 1
            self.blocks[block] = held
            if not held:
                self._free[block] = None
                self.pinned -= 1

    def _pin(self, block: int) -> None:
        held = self.blocks.get(block)
        if held is None:
            self.blocks[block] = 1
            self.pinned += 1
            if self.on_hold is not None:
                self.on_hold(block)
            return
        self.blocks[block] = held + 1
        if not held:
            del self._free[block]
            self.pinned += 1

    def _shrink(self) -> None:
        while self._free and len(self.blocks) + self.reserved > self.capacity_blocks:
            block, _ = self._free.popitem(last=False)
            del self.blocks[block]
            if self.on_drop is not None:
                self.on_drop(block)
