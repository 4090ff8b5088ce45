"""Requests that wait because every worker they want has enough to do: cache-aware, fair, bounded. One queue per pool of workers.

A worker is *open* while its waiting prompts are worth less than theta seconds. Binding a request later than that costs the worker
nothing and lets us choose among the waiting: of the first `look_ahead` requests, the one with the least share of uncached prompt,
minus a little for its age, whose best worker is open. After `affinity_s` a request takes any open worker; after its own deadline
it is given back as too late.

Classes and tenants get weighted shares of tokens: each (class, tenant) flow has a virtual time that its tokens advance, and only
flows within one quantum of the least are looked at together (a quarter of what the fleet computes in theta seconds, so that a heavy
tenant delays a light one by about theta). The batch class goes only when nothing else waits, and stops at 90 % of theta. A request older
than `affinity_s` moves up one class.

Clock-free; the costs come from `rule`. Rows of one matrix hold each waiting request's hits, so that one look is a few array operations.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fleet_router.decide.load import CAPACITY, COMMITTED, PENALTY, RATE, ROWS, STEP, STEP_CTX, UNIT, WAIT, LoadTable
from fleet_router.decide.rivals import Rivals, Wish
from fleet_router.decide.rule import NEAR_TIE_S, NEAR_TIE_SHARE, Ask, Hits, Pool, delta
from fleet_router.decide.told import Prefix

CLASSES: Final = ("system", "interactive", "default", "batch")  # highest first
CLASS_WEIGHTS: Final = {"system": 8.0, "interactive": 4.0, "default": 2.0, "batch": 1.0}
BATCH_SHARE_OF_THETA: Final = 0.9
REFRESH_S: Final = 1.0  # hits of a waiting request may be so old
LOOK_CELLS: Final = 1 << 16  # requests x workers of one look
MIN_LOOK_AHEAD: Final = 64
MAX_LOOKS: Final = 4
QUANTUM: Final = 0.25  # of what the fleet computes in theta
ROOM_AFTER: Final = 2.0  # times the affinity wait: then room is made for a request that fits nowhere
MAX_FINISHED: Final = 4096
BATCH: Final = "batch"
WISHES_EACH: Final = 5
BATCH_LEVEL: Final = 10.0  # of orders, which are about 1 and less: where others' requests wait too, batch comes after them
STUCK_FIRST: Final = 10.0  # and a request that room is made for before them

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class QueueRules:
    """The bounds. Times in seconds."""

    theta_s: float = 1.25  # of learned speeds, which include what running decodes take
    look_ahead: int = 256
    affinity_s: float = 20.0
    age_weight: float = 0.02  # of the order, per second
    max_requests: int = 1024
    max_bytes: int = 1 << 30
    max_requests_per_tenant: int = 1024


class QueueFull(Exception):
    """A bound is reached. `of_tenant`: the tenant's own, else the queue's."""

    def __init__(self, *, of_tenant: bool, limit: int) -> None:
        super().__init__(f"{limit} requests wait already")
        self.of_tenant = of_tenant
        self.limit = limit


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in the queue, until it is taken, withdrawn or too late."""

    ask: Ask
    keys: Sequence[int]
    arrived: float
    deadline: float
    tenant: str = ""
    klass: str = "default"
    size_bytes: int = 0
    exclude: frozenset[int] = frozenset()
    prompt_only: bool = False  # there is no answer to decode: a prefill worker serves it alone
    tag: Any = None  # the caller's own
    row: int = -1  # in the matrix of hits; -1: not in a queue
    hits_at: float = -math.inf
    moved_up: int = 0
    flow: Flow | None = None

    @property
    def queued(self) -> bool:
        return self.row >= 0


@dataclass(slots=True, eq=False)
class Flow:
    """One tenant's requests of one class, oldest first."""

    klass: str
    tenant: str
    weight: float
    at: float = 0.0  # virtual time: tokens that it got, over its weight
    requests: dict[int, Waiting] = field(default_factory=dict)  # by row, in order of arrival


class CacheQueue:
    """See the module. `look_up(keys, key_tokens)` gives the hits of a prompt in all workers now."""

    def __init__(self, table: LoadTable, rules: QueueRules, look_up: Callable[[Sequence[int], float], Hits], rivals: Rivals | None = None) -> None:
        self.rules = rules
        self.rivals = rivals or Rivals()
        self._table = table
        self._look_up = look_up
        self._pool = Pool()
        self._flows: dict[tuple[str, str], Flow] = {}
        self._weights: dict[str, float] = {}
        self._virtual = 0.0
        self._rows: list[Waiting | None] = []
        self._free_rows: list[int] = []
        self._hits: Floats = np.zeros((64, 8))  # [row, slot] tokens that need not be computed
        self._facts: Floats = np.zeros((64, 3))  # [row]: prompt tokens, answer tokens, arrival
        self._finished: dict[tuple[str, str], float] = {}  # flows that are empty now, but got more than their share
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._number = 0
        self._per_tenant: dict[str, int] = {}
        self._aging: deque[tuple[float, Waiting]] = deque()
        self.size_bytes = 0
        self.stuck: Waiting | None = None  # fits nowhere for long: room is being made for it

    def __len__(self) -> int:
        return sum(self._per_tenant.values())

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def table(self) -> LoadTable:
        return self._table

    @property
    def num_slots(self) -> int:
        return self._table.width

    def set_pool(self, pool: Pool) -> None:
        """The workers changed: hits are looked up anew."""
        self.rivals.idle(self._pool.slots_prompt)
        self._pool = pool
        for request in self.waiting():
            request.hits_at = -math.inf

    def set_tenant_weight(self, tenant: str, weight: float) -> None:
        """Share of a tenant against others; 1 when not set. Holds for flows that begin from now on."""
        self._weights[tenant] = weight

    def waiting(self) -> Iterator[Waiting]:
        """All requests, flow by flow."""
        for flow in self._flows.values():
            yield from flow.requests.values()

    # -- in and out

    def put(self, request: Waiting) -> None:
        """Raises QueueFull."""
        rules = self.rules
        if len(self) >= rules.max_requests or self.size_bytes + request.size_bytes > rules.max_bytes:
            raise QueueFull(of_tenant=False, limit=rules.max_requests)
        mine = self._per_tenant.get(request.tenant, 0)
        if mine >= rules.max_requests_per_tenant:
            raise QueueFull(of_tenant=True, limit=rules.max_requests_per_tenant)
        assert request.klass in CLASS_WEIGHTS and not request.queued
        self._per_tenant[request.tenant] = mine + 1
        self.size_bytes += request.size_bytes
        if self._free_rows:
            request.row = self._free_rows.pop()
            self._rows[request.row] = request
        else:
            request.row = len(self._rows)
            self._rows.append(request)
        if request.row >= self._facts.shape[0]:
            self._facts = np.concatenate([self._facts, np.zeros_like(self._facts)])
            self._hits = np.concatenate([self._hits, np.zeros_like(self._hits)])
        self._facts[request.row] = (request.ask.prompt_tokens, request.ask.answer_tokens, request.arrived)
        request.hits_at = -math.inf
        self._join(request)
        self._number += 1
        heapq.heappush(self._deadlines, (request.deadline, self._number, request))
        if request.klass != CLASSES[0]:
            self._aging.append((request.arrived + rules.affinity_s, request))

    def withdraw(self, request: Waiting) -> None:
        """It does not wait any more: taken, too late, or its client left. Again is nothing."""
        if not request.queued:
            return
        self._leave(request)
        self._rows[request.row] = None
        self._free_rows.append(request.row)
        request.row = -1
        self.size_bytes -= request.size_bytes
        left = self._per_tenant[request.tenant] - 1
        if left:
            self._per_tenant[request.tenant] = left
        else:
            del self._per_tenant[request.tenant]
            if not self._per_tenant:
                self.rivals.idle(self._pool.slots_prompt)
        if len(self._deadlines) > 2 * len(self) + 64:
            self._deadlines = [d for d in self._deadlines if d[2].queued]
            heapq.heapify(self._deadlines)

    def too_late(self, now: float) -> list[Waiting]:
        """Takes out the requests whose deadline is over."""
        out = []
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].queued):
            request = heapq.heappop(self._deadlines)[2]
            if request.queued:
                self.withdraw(request)
                out.append(request)
        return out

    def next_deadline(self) -> float:
        """Infinite when nothing waits."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def predicted_wait_s(self) -> float:
        """How long the fleet needs for all that waits now: what a refused client is told."""
        slots = self._pool.slots_prompt
        if not slots.size:
            return 0.0
        tokens = sum(r.ask.prompt_tokens - (self._hits[r.row, slots].max() if r.hits_at > -math.inf else 0.0) for r in self.waiting())
        rate = float(self._table.matrix[RATE, slots].sum())
        return (float(tokens) + float((self._table.matrix[WAIT, slots] * self._table.matrix[RATE, slots]).sum())) / rate

    def expect(self, slot: int, keys: Sequence[int], block_tokens: float) -> None:
        """A prompt went to a worker: those that wait and share its beginning will find it there."""
        if not keys or slot >= self._hits.shape[1]:
            return
        first = keys[0]
        for request in self.waiting():
            mine = request.keys
            if mine and mine[0] == first:
                low, high = 1, min(len(mine), len(keys))
                while low < high:
                    middle = (low + high + 1) >> 1
                    if mine[middle - 1] == keys[middle - 1]:
                        low = middle
                    else:
                        high = middle - 1
                self._hits[request.row, slot] = max(self._hits[request.row, slot], low * block_tokens)

    def expect_told(self, slot: int, prefix: Prefix, block_tokens: float) -> None:
        """The same of another router's prompt."""
        if not prefix or slot >= self._hits.shape[1]:
            return
        for request in self.waiting():
            mine = request.keys
            for depth, key in reversed(prefix):
                if depth <= len(mine) and mine[depth - 1] == key:
                    self._hits[request.row, slot] = max(self._hits[request.row, slot], depth * block_tokens)
                    break

    # -- taking

    def take(self, now: float) -> tuple[Waiting, Bools] | None:
        """The next request that may go, taken out; with the slots (of workers that compute prompts) that are open to it.

        None when no worker is open to any of those that are looked at.
        """
        slots = self._pool.slots_prompt
        if not self._per_tenant or not slots.size:
            return None
        m = self._table.matrix[:, slots]
        shared = self._table.routers > 1
        if not shared and not (m[WAIT] < self.rules.theta_s).any():
            return None
        self._move_up(now)
        look = _Look(self, slots, m, now)
        for number, requests in enumerate(self._windows(slots.size, float(m[RATE].sum()))):
            found = look.best(requests, tell=shared and not number)
            if found is not None:
                request, is_open, tokens = found
                self._charge(request, tokens)
                self.withdraw(request)
                return request, is_open
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError when the tables disagree."""
        waiting = list(self.waiting())
        assert len(waiting) == len(self) == sum(r is not None for r in self._rows)
        assert all(self._rows[r.row] is r for r in waiting)
        assert sorted(self._free_rows + [r.row for r in waiting]) == list(range(len(self._rows)))
        assert self.size_bytes == sum(r.size_bytes for r in waiting)
        assert all(flow.requests for flow in self._flows.values()), "an empty flow is kept"
        assert all(r.flow is self._flows[(r.flow.klass, r.tenant)] for r in waiting if r.flow is not None)

    # -- inside

    def _windows(self, num_workers: int, rate: float) -> Iterator[list[Waiting]]:
        """The requests to look at together: first those of the flows within one quantum of the flow that got least, then the others."""
        flows = [f for f in self._flows.values() if f.klass != BATCH] or list(self._flows.values())
        flows.sort(key=lambda f: f.at)
        room = min(self.rules.look_ahead, max(MIN_LOOK_AHEAD, LOOK_CELLS // num_workers))
        for _ in range(MAX_LOOKS):
            if not flows:
                return
            limit = flows[0].at + QUANTUM * self.rules.theta_s * rate
            group = [f for f in flows if f.at <= limit]
            flows = flows[len(group) :]
            left, shares = room, {}
            for n, flow in enumerate(sorted(group, key=lambda f: len(f.requests))):  # what short flows leave, long ones may use
                shares[id(flow)] = share = min(len(flow.requests), -(-left // (len(group) - n)))
                left -= share
            yield [request for flow in group for request in islice(flow.requests.values(), shares[id(flow)])]

    def _charge(self, request: Waiting, tokens: float) -> None:
        flow = request.flow
        assert flow is not None
        self._virtual = max(self._virtual, flow.at)
        flow.at += tokens / flow.weight

    def refresh(self, requests: Sequence[Waiting], now: float) -> None:
        """Looks the hits up again where they are too old."""
        width = self._table.width
        if self._hits.shape[1] < width:
            self._hits = np.pad(self._hits, ((0, 0), (0, width - self._hits.shape[1])))
        every = np.arange(width)
        for request in [r for r in requests if now - r.hits_at > REFRESH_S]:
            request.hits_at = now
            self._hits[request.row] = self._look_up(request.keys, request.ask.key_tokens).saved(every)

    def rows_of(self, requests: Sequence[Waiting]) -> tuple[Floats, Floats]:
        """(tokens saved in every slot, (prompt, answer, arrived)) of each request."""
        rows = np.array([r.row for r in requests], np.intp)
        return self._hits[rows], self._facts[rows]

    def _join(self, request: Waiting) -> None:
        klass = CLASSES[max(0, CLASSES.index(request.klass) - request.moved_up)]
        flow = self._flows.get((klass, request.tenant))
        if flow is None:
            weight = CLASS_WEIGHTS[klass] * self._weights.get(request.tenant, 1.0)
            at = max(self._virtual, self._finished.pop((klass, request.tenant), 0.0))
            flow = self._flows[(klass, request.tenant)] = Flow(klass, request.tenant, weight, at)
        flow.requests[request.row] = request
        request.flow = flow

    def _leave(self, request: Waiting) -> None:
        flow = request.flow
        assert flow is not None
        del flow.requests[request.row]
        request.flow = None
        if not flow.requests:
            del self._flows[(flow.klass, flow.tenant)]
            if flow.at > self._virtual:
                self._finished[(flow.klass, flow.tenant)] = flow.at
                if len(self._finished) > MAX_FINISHED:
                    self._finished = {name: at for name, at in self._finished.items() if at > self._virtual}

    def _move_up(self, now: float) -> None:
        """Where there is only one flow, nobody could be passed."""
        while self._aging and len(self._flows) > 1 and (self._aging[0][0] <= now or not self._aging[0][1].queued):
            _, request = self._aging.popleft()
            if request.queued and request.moved_up == 0:
                self._leave(request)
                request.moved_up = 1
                self._join(request)


class _Look:
    """One look at some waiting requests, as array operations: rows are requests, columns the workers that compute prompts."""

    def __init__(self, queue: CacheQueue, slots: Ints, m: Floats, now: float) -> None:
        self._queue = queue
        self._slots = slots
        self._m = m
        self._now = now
        self._num_alone = queue.pool.slots_alone.size
        self._kept: tuple[int, Wish] | None = None  # a worker that we keep for a request

    def best(self, requests: list[Waiting], *, tell: bool) -> tuple[Waiting, Bools, float] | None:
        """The request that may go and needs least, the slots open to it, and the tokens it costs. None when none may go.

        Args: tell: other routers are to know what waits here.
        """
        rules, m = self._queue.rules, self._m
        self._queue.refresh(requests, self._now)
        saved, facts = self._queue.rows_of(requests)
        prompt, answer, age = facts[:, 0:1], facts[:, 1:2], self._now - facts[:, 2]
        miss = np.maximum(prompt - saved[:, self._slots], 1.0)
        costs = m[WAIT] + m[UNIT] * miss + m[PENALTY]
        flow = requests[0].flow
        is_batch = flow is not None and flow.klass == BATCH  # batch never shares a look with others
        share = BATCH_SHARE_OF_THETA if is_batch else 1.0
        is_open = self._add_answers(costs, prompt, answer, requests) & (m[WAIT] < share * rules.theta_s)
        self._exclude(requests, costs, is_open)
        self._keep_room(requests, is_open, age)
        least = costs.min(axis=1)
        limit = least + np.minimum(NEAR_TIE_S, NEAR_TIE_SHARE * least)
        wants = (costs <= limit[:, None]) | (age > rules.affinity_s)[:, None]
        wanted: Bools = np.logical_and(is_open, wants)
        rivals = self._queue.rivals
        if tell or rivals.any:
            levels = miss / prompt + rules.age_weight * facts[:, 2:3] + (BATCH_LEVEL if is_batch else 0.0)
            if tell:
                self._tell(requests, levels, wants, facts)
            if rivals.any:
                wanted = rivals.leave(self._slots, m, levels, wanted, self._now)
        may = wanted.any(axis=1)
        if not may.any():
            return None
        column = np.where(wanted, costs, np.inf).argmin(axis=1)
        missing = miss[np.arange(len(requests)), column]
        order = np.where(may, missing / prompt[:, 0] - rules.age_weight * age, np.inf)
        at = int(order.argmin())
        mask = np.zeros(self._queue.num_slots, np.bool_)
        mask[self._slots[wanted[at]]] = True
        return requests[at], mask, float(missing[at] + answer[at, 0])

    def _add_answers(self, costs: Floats, prompt: Floats, answer: Floats, requests: list[Waiting]) -> Bools:
        """Adds what the answers cost, where they are made; returns which requests fit where."""
        n, pool, m = self._num_alone, self._queue.pool, self._m
        fits = np.ones(costs.shape, np.bool_)
        prompts = [at for at, request in enumerate(requests) if request.prompt_only] if pool.prefill else []
        base = costs[prompts, n:] if prompts else None
        if n:
            cost, fits[:, :n] = _answers(m[:, :n], prompt, answer, delta(self._queue.table, pool.slots_alone))
            costs[:, :n] += cost
        paired = pool.pairable.any(axis=1)  # prefill workers that can hand over to somebody
        if not paired.all():
            costs[:, n:][:, ~paired], fits[:, n:][:, ~paired] = np.inf, False
        if paired.any():
            d = self._queue.table.matrix[:, pool.slots_decode]
            cost, fit = _answers(d, prompt, answer, delta(self._queue.table, pool.slots_decode))
            costs[:, n:] += np.where(fit, cost + d[PENALTY], np.inf).min(axis=1)[:, None]
            p = m[:, n:]
            fits[:, n:] &= np.asarray(fit.any(axis=1))[:, None] & ((p[COMMITTED] + prompt <= p[CAPACITY]) | (p[WAIT] <= 0))
        if base is not None:  # their prefill worker is where they end
            cost, fits[prompts, n:] = _answers(m[:, n:], prompt[prompts], answer[prompts], delta(self._queue.table, pool.slots_prefill))
            costs[prompts, n:] = base + cost
        return fits

    def _keep_room(self, requests: list[Waiting], is_open: Bools, age: Floats) -> None:
        """While a request fits nowhere for long, the emptiest worker is kept for it: else small ones pass it for ever."""
        queue = self._queue
        stuck = (age > ROOM_AFTER * queue.rules.affinity_s) & ~is_open.any(axis=1)
        if queue.stuck is None or not queue.stuck.queued:
            queue.stuck = requests[int(np.where(stuck, age, -np.inf).argmax())] if stuck.any() else None
        if queue.stuck is not None:
            others = np.array([r is not queue.stuck for r in requests])
            kept = int((self._m[COMMITTED] / self._m[CAPACITY]).argmin())
            is_open[others, kept] = False
            self._kept = kept, Wish(self._level_of_stuck(queue.stuck), queue.stuck.ask.prompt_tokens + queue.stuck.ask.answer_tokens, True)
        if queue.rivals.any:
            is_open[:, queue.rivals.kept(self._slots, self._kept[1].level if self._kept is not None else math.inf)] = False

    def _level_of_stuck(self, request: Waiting) -> float:
        return self._queue.rules.age_weight * request.arrived - STUCK_FIRST

    def _tell(self, requests: list[Waiting], levels: Floats, wants: Bools, facts: Floats) -> None:
        """The best requests for each worker, for other routers: of all, of those that need half as much room as this, and so on."""
        wanted = np.where(wants, levels, np.inf)
        need, every = facts[:, 0] + facts[:, 1], np.arange(wanted.shape[1])
        slots = self._slots.tolist()
        found: dict[int, tuple[Wish, ...]] = {}
        for _ in range(WISHES_EACH):
            best = wanted.argmin(axis=0)
            least, tokens = wanted[best, every], need[best]
            for slot, level, size in zip(slots, least.tolist(), tokens.tolist(), strict=True):
                if level < math.inf:
                    found[slot] = (*found.get(slot, ()), Wish(level, int(size)))
            wanted[need[:, None] > tokens / 2] = np.inf
        if self._kept is not None:
            slot = slots[self._kept[0]]
            found[slot] = (self._kept[1], *found.get(slot, ()))
        self._queue.rivals.set_ours(self._slots, found)

    def _exclude(self, requests: list[Waiting], costs: Floats, is_open: Bools) -> None:
        for n in [n for n, request in enumerate(requests) if request.exclude]:
            out = np.isin(self._slots, list(requests[n].exclude))
            if not out.all():
                costs[n, out] = np.inf
                is_open[n, out] = False


def _answers(m: Floats, prompt: Floats, answer: Floats, weight: float) -> tuple[Floats, Bools]:
    """Cost of the answers [request, worker], and whether they fit the worker's KV; a worker without requests takes any."""
    steps = answer * (m[STEP] + m[STEP_CTX] * prompt)
    need = (m[COMMITTED] + prompt + answer) / m[CAPACITY]
    return steps * (weight + np.maximum(need - 1.0, 0.0)), (need <= 1.0) | (m[ROWS] <= 0)
