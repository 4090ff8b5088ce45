"""Owns the table and the deciding half. The edge asks it for a lease, discovery and registry feed it; it does no HTTP of its own.

One event loop. A choice counts its request before anything is awaited, and a lease gives the count back exactly once. Requests that
find every worker busy wait in the queues of `decide.fleet`; whatever frees work makes the brain look at them again, at most once per
turn of the loop, and a timer does while any waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec

from fleet_contract import names
from fleet_contract.worker import LoadReport, WorkerRecord
from fleet_router import errors, revisions
from fleet_router.brain.explain import Choice
from fleet_router.brain.limits import LimitKeeper
from fleet_router.brain.polled import load_of_others
from fleet_router.brain.registry import Endpoint, worker_state
from fleet_router.brain.worker import Worker
from fleet_router.counters import Counters
from fleet_router.decide.fleet import Decision, Fleet, Taken
from fleet_router.decide.index import PrefixIndex
from fleet_router.decide.load import Pick, Speed
from fleet_router.decide.queue import CacheQueue, QueueFull, QueueRules, Waiting
from fleet_router.decide.rule import Ask, Member, Pool
from fleet_router.desk import ComingLease, Lease, Leg, Turn, Want
from fleet_router.engines.base import PolledLoad
from fleet_router.observed import Observed, ServiceFacts
from fleet_router.settings import Settings
from fleet_router.table import Service, ServiceKey, Table, WorkerView, service_of_record, static_services

log = logging.getLogger(__name__)

KEPT_DECISIONS: Final = 64
FAULT_PENALTY_S: Final = 1.0
MAX_FAULTS: Final = 5
MAX_QUEUED_BYTES: Final = 1 << 30  # bodies of requests that wait
LOOK_EVERY_S: Final = 0.1  # while requests wait
_ALONE: Final = (names.ROLE_UNIFIED,)
_PROMPT_ONLY: Final = (names.ROLE_UNIFIED, names.ROLE_PREFILL)
_PICKED: Final = {role: (("role", role),) for role in names.ROLES}
_PICKED_OTHER: Final = (("role", "other"),)

Key = tuple[ServiceKey, str, bool]  # service, revision, any role will do


class QueuedTurn(Turn):
    """It waits while all workers are busy."""

    def __init__(self, coming: ComingLease, key: Key, request: Waiting) -> None:
        super().__init__(coming)
        self.key = key
        self.request = request


class Waits:
    """What the brain knows of a request in a queue: its `Waiting.tag`."""

    def __init__(self, want: Want, coming: ComingLease) -> None:
        self.want = want
        self.coming = coming


class WorkerWatcher(Protocol):
    """Is told of each incarnation of a worker: `added` before it can be picked, `gone` before its slot is cleared."""

    def added(self, worker: Worker) -> None: ...

    def gone(self, worker: Worker) -> None: ...


class Brain:
    """See the module."""

    def __init__(self, settings: Settings, counters: Counters, clock: Callable[[], float], draw: Callable[[int], int] | None = None) -> None:
        self.settings = settings
        self.counters = counters
        self.table: Table[Worker] = Table()
        self._draw = draw or random.Random(secrets.randbits(64)).randrange
        rules = QueueRules(max_requests=settings.max_queue, max_requests_per_tenant=settings.max_queue, max_bytes=MAX_QUEUED_BYTES)
        self.deciding = Fleet(self._draw, rules)
        self.pick_id = f"{settings.router_id}.{secrets.token_hex(4)}"  # of this process life: numbers start again at 0
        self.poke: Callable[[str], None] = lambda key: None
        self.all_asked: Callable[[], bool] = lambda: False
        self.on_suspect: Callable[[str, int, str], None] = lambda host, port, why: None
        self.on_table: Callable[[], None] = lambda: None  # the table changed, or may have
        self.edges_told: Callable[[], bool] = lambda: True  # all edges said what they have in flight
        self.watchers: list[WorkerWatcher] = []
        self.stream_of: Callable[[Worker], dict[str, Any]] | None = None  # how a worker's KV events are; set by their reader
        self.streams_settled: Callable[[], bool] = lambda: True
        self.peers: Callable[[], dict[str, int]] = lambda: {"expected": 0, "live": 0}  # other routers
        self.limits = LimitKeeper(settings.workers, clock)
        self.decisions: deque[Choice] = deque(maxlen=KEPT_DECISIONS)
        self.waiting: dict[ServiceKey, int] = {}
        self.draining = False
        self.workers: list[Worker] = []  # those that are removed stay until nothing is in flight on them
        self._synced = False
        self.clock = clock
        self._by_endpoint: dict[str, Worker] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._by_slot: dict[int, Worker] = {}
        self.observed: Observed | None = None
        self._taken: dict[int, Taken] = {}  # by lease
        self._leases = 0
        self._traffic: dict[ServiceKey, list[tuple[str, int]]] = {}
        self._wakers: set[asyncio.Future[None]] = set()
        self._leaving = False  # a look is due when other routers had their turn
        self._looking = False  # a look at the queues is due in this turn of the loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def degraded(self) -> str:
        """Never: this is the half that decides."""
        return ""

    @property
    def index(self) -> PrefixIndex:
        """Which worker holds which prefix."""
        return self.deciding.index

    def watch(self, watcher: WorkerWatcher) -> None:
        """Tells of the workers that are here, and from now on of each change."""
        self.watchers.append(watcher)
        for worker in self.workers:
            if not worker.removed:
                watcher.added(worker)

    def unwatch(self, watcher: WorkerWatcher) -> None:
        """Tells it no more. Of one that never watched it is nothing."""
        if watcher in self.watchers:
            self.watchers.remove(watcher)

    # -- facts in

    def take_observed(self, observed: Observed) -> None:
        """A new snapshot of discovery."""
        self.observed = observed
        self._rebuild()

    def take_endpoint(self, endpoint: Endpoint) -> None:
        """Record or health of one endpoint changed."""
        worker = self._by_endpoint.get(endpoint.key)
        record = endpoint.record
        self._endpoints[endpoint.key] = endpoint
        if endpoint.removed:
            del self._endpoints[endpoint.key]
        if worker is not None and (endpoint.removed or record is None or worker.identity != (record.pod_uid, record.rank, record.incarnation)):
            self._remove(endpoint.key, worker)
            worker = None
        if record is not None and not endpoint.removed:
            if worker is None:
                worker = self._new_worker(endpoint)
            worker.record = record
            worker.state = worker_state(endpoint, draining=worker.says_draining)
            worker.drain_deadline = endpoint.drain_deadline
        self._rebuild()

    def take_load(self, topic_uid: str, report: LoadReport) -> None:
        """A load report; one of another incarnation means that the worker has restarted."""
        for key, worker in self._by_endpoint.items():
            record = worker.record
            if record.pod_uid != topic_uid or record.rank != report.rank:
                continue
            if record.incarnation != report.incarnation:
                self.poke(key)
                return
            was_draining = worker.says_draining
            worker.load.take_report(report, self.pick_id, self.clock())
            if report.draining != was_draining:
                self.take_endpoint(self._endpoints[key])
            self._look_soon()
            return

    def take_polled(self, endpoint: Endpoint, polled: PolledLoad) -> None:
        """What an engine without load reports says when asked."""
        worker = self._by_endpoint.get(endpoint.key)
        if worker is not None:
            worker.load.take_report(load_of_others(polled, worker.load), self.pick_id, self.clock())
            self._look_soon()

    @property
    def synced(self) -> bool:
        """Since its start this process has once held all that discovery knew, with every endpoint asked and its KV events read. It stays so.

        Static workers are not known before they answer: there at least one unit has to be ready.
        """
        if not self._synced and self.all_asked() and self.edges_told() and self.streams_settled():
            if self.settings.kubernetes:
                self._synced = self.observed is not None
            else:
                self._synced = any(s.ready_units() for s in self.table.services.values())
        return self._synced

    def unknown_endpoints(self) -> list[Endpoint]:
        """Those that were asked and have not told who they are."""
        return [e for key, e in self._endpoints.items() if key not in self._by_endpoint]

    def reasons(self) -> dict[Worker, str]:
        """Why workers are not ready, in their own words or those of whoever asked them; empty of one that is."""
        return {worker: self._endpoints[key].reason for key, worker in self._by_endpoint.items()}

    # -- choice

    def choose_revision(self, service: Service[Worker], exclude: Collection[WorkerView] = ()) -> str | None:
        """A revision with ready workers, by the operator's weights."""
        return revisions.choose_revision(service.facts.traffic, service.ready_units(exclude), self._draw)

    def pick(self, want: Want) -> Lease | None:
        """Chooses and counts at once, however busy the workers are. None when no worker is ready."""
        decision = self._decide(want)
        return self._lease(want, decision) if decision is not None else None

    def begin(self, want: Want, timeout_s: float) -> Lease | Turn | None:
        """See `Desk`: at once when the best worker is not busy, else from the queue."""
        if want.any_role:  # it costs a worker next to nothing
            return self.pick(want)
        key = self._key(want)
        pool = self.deciding.pool(key)
        if pool is None:
            return None
        exclude = frozenset([w.slot for w in want.exclude if not w.removed]) if want.exclude else frozenset()
        if exclude and not (pool.for_prompts() if want.prompt_only else pool).without(exclude).is_usable:
            return self.pick(want)  # the others failed too often of late: still rather one of them than the same again
        now, ask = self.clock(), _ask(want)
        decision = self.deciding.at_once(key, ask, want.keys, now, want.klass, exclude, prompt_only=want.prompt_only)
        if decision is not None:
            return self._lease(want, decision)
        coming = ComingLease(asyncio.get_running_loop())
        tag = Waits(want, coming)
        request = Waiting(ask, want.keys, now, now + timeout_s, want.tenant, want.klass, want.size_bytes, exclude, want.prompt_only, tag)
        try:
            self.deciding.wait(key, request)
        except QueueFull as e:
            raise errors.busy_queue_full(want.service[1], e.limit, of_tenant=e.of_tenant) from None
        self._look_soon()
        self._set_timer()
        return QueuedTurn(coming, key, request)

    def leave(self, turn: Turn) -> None:
        """Whoever waits is gone; what it may just have got is given back."""
        assert isinstance(turn, QueuedTurn)
        if turn.request.queued:
            self.deciding.queues[turn.key].withdraw(turn.request)
        turn.coming.leave()

    async def explain(self, want: Want) -> dict[str, Any] | None:
        """The decision that would be made now, in words, without making it."""
        decision = self._decide(want)
        return Choice(self.label(want.service), want.revision, want.request_id, want.made_of, decision).as_json() if decision is not None else None

    def first_token(self, lease: Lease) -> None:
        """The prompt of a lease is computed."""
        self.deciding.first_token(self._taken[lease.number], self.clock())
        if self.deciding.needs_ticks:
            self._set_timer()
        self._look_soon()

    def give_back(self, lease: Lease, leg: Leg) -> None:
        """A leg is over."""
        self.deciding.release(self._taken[lease.number], 1 if leg is lease.serving and lease.prefill is not None else 0)
        self._leave_worker(leg)

    def end(self, lease: Lease, left: list[Leg]) -> None:
        """All legs of a lease are over."""
        self.deciding.release(self._taken.pop(lease.number))
        for leg in left:
            self._leave_worker(leg)

    def _leave_worker(self, leg: Leg) -> None:
        worker = leg.worker
        assert isinstance(worker, Worker)
        if worker.breaker.state == "half-open":
            worker.breaker.undecided()
            self._set_pools()
        self._one_less(worker)

    def _one_less(self, worker: Worker) -> None:
        worker.inflight -= 1
        assert worker.inflight >= 0, worker.name
        if worker.removed and not worker.inflight:
            self.workers.remove(worker)
            self._rebuild()
        self._look_soon()

    def adopt(self, worker: Worker, miss: int, prompt: int, room: int, *, started: bool) -> Pick:
        """Counts a request that a worker has already, chosen before this brain was there."""
        worker.inflight += 1
        return worker.load.adopt(miss, prompt, room, self.clock(), started=started)

    def adopted_started(self, worker: Worker, pick: Pick) -> None:
        """The first token of such a request."""
        worker.load.start(pick, self.clock(), seen=False)
        self._look_soon()

    def adopted_over(self, worker: Worker, pick: Pick) -> None:
        """Such a request has left its worker."""
        worker.load.release(pick)
        self._one_less(worker)

    def learn_cached(self, lease: Lease, actual: int) -> None:
        """Compares the index with what a worker had cached."""
        worker = (lease.prefill or lease.serving).worker
        self.counters.add("prompt_tokens_total", lease.prompt_tokens)
        self.counters.add("predicted_cached_tokens_total", lease.predicted_tokens)
        self.counters.add("cached_tokens_total", actual)
        taken = self._taken[lease.number]
        self.deciding.computed(taken, self.clock())  # of an answer in one piece the events may still be on their way
        if self.deciding.needs_ticks:
            self._set_timer()
        if not worker.removed:
            self.deciding.learn_cached(worker.slot, taken, actual)

    def learn_step(self, lease: Lease, steps: int, seconds: float) -> None:
        """So many tokens after the first took the serving worker so long."""
        worker = lease.serving.worker
        assert isinstance(worker, Worker)
        worker.load.learn_step(seconds, steps)

    def blame(self, worker: WorkerView) -> None:
        """A fault of the worker itself: others are preferred until it answers well again; after some in a row it gets nothing for a while."""
        assert isinstance(worker, Worker)
        worker.faults = min(MAX_FAULTS, worker.faults + 1)
        worker.load.set_penalty(worker.faults * FAULT_PENALTY_S)
        was_open = worker.breaker.state == "open"
        worker.breaker.fault(self.clock())
        if worker.breaker.state == "open" and not was_open and not worker.removed:
            pause_s = worker.breaker.pause_s
            log.warning("worker fails again and again: it gets no requests for a while", extra={"worker": worker.name, "seconds": pause_s})
            self.counters.add("breakers_opened_total")
            self._set_pools()
            asyncio.get_running_loop().call_later(pause_s + 0.001, self._set_pools)

    def praise(self, lease: Lease) -> None:
        """Its workers answered well."""
        for leg in lease.legs():
            worker = leg.worker
            assert isinstance(worker, Worker)
            if worker.faults:
                worker.faults = 0
                worker.load.set_penalty(0.0)
            was = worker.breaker.state
            worker.breaker.success(self.clock())
            if worker.breaker.state != was:
                self._set_pools()

    def suspect(self, worker: WorkerView, why: str) -> None:
        """A request found it unreachable."""
        self.on_suspect(worker.host, worker.port, why)

    def probe(self, worker: Worker) -> None:
        """Something about it is odd: it is asked how it is, and meanwhile serves on."""
        for key, known in self._by_endpoint.items():
            if known is worker:
                self.poke(key)

    async def wait_change(self, service: Service[Worker], timeout_s: float) -> None:
        """Waits until something in the table changed, or the time is over. The caller counts as queued. Raises ApiError when too many wait."""
        key = service.key
        self.one_waits(key)
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wakers.add(waker)
        try:
            await asyncio.wait([waker], timeout=timeout_s)
        finally:
            self._wakers.discard(waker)
            self.one_waits_no_more(key)

    def one_waits(self, key: ServiceKey, *, bounded: bool = True) -> None:
        """Counts a request without any ready worker. Raises ApiError when too many wait; not `bounded`: one that waits already."""
        if bounded and sum(self.waiting.values()) >= self.settings.max_queue:
            raise errors.queue_full(self.label(key), self.settings.max_queue)
        self.waiting[key] = self.waiting.get(key, 0) + 1

    def one_waits_no_more(self, key: ServiceKey) -> None:
        """It has its answer, or gave up."""
        self.waiting[key] -= 1
        if not self.waiting[key]:
            del self.waiting[key]

    # -- inside

    def _key(self, want: Want) -> Key:
        return (want.service, want.revision, want.any_role)

    def label(self, key: ServiceKey) -> str:
        """A service in errors."""
        service = self.table.services.get(key)
        return service.label if service is not None else key[1]

    def queues(self) -> list[tuple[Key, CacheQueue]]:
        """All queues of busy pools."""
        return list(self.deciding.queues.items())  # type: ignore[arg-type]

    def _pool_of(self, service: Service[Worker], revision: str, exclude: Collection[WorkerView] = (), alone: Collection[str] = _ALONE) -> Pool:
        """Ready workers of a revision by role. Args: alone: see `_pool`."""
        now = self.clock()
        ready = [w for w in service.workers if w.routable and w.record.revision == revision and w not in exclude and w.record.role in names.ROLES]
        trusted = _pool([w for w in ready if w.breaker.allows(now)], alone)
        return trusted if trusted.is_usable else _pool(ready, alone)  # better a worker that failed than none

    def _decide(self, want: Want) -> Decision | None:
        service = self.table.services.get(want.service)
        if service is None:
            return None
        alone = names.ROLES if want.any_role else _PROMPT_ONLY if want.prompt_only else _ALONE
        if want.exclude or alone is not _ALONE:
            pool: Pool | None = self._pool_of(service, want.revision, want.exclude, alone)
        else:
            pool = self.deciding.pool(self._key(want))
        if pool is None or not pool.is_usable:
            return None
        return self.deciding.decide(pool, _ask(want), want.keys, self.clock())

    def _lease(self, want: Want, decision: Decision) -> Lease:
        """Counts a decision."""
        self.decisions.append(Choice(self.label(want.service), want.revision, want.request_id, want.made_of, decision))
        taken = self.deciding.take(decision, want.keys, self.clock(), silent=want.silent, key=self._key(want))
        self._leases += 1
        self._taken[self._leases] = taken
        legs: list[Leg] = []
        for load, pick in taken.picks:
            worker = self._by_slot[load.slot]
            worker.inflight += 1
            if worker.breaker.state == "half-open":
                worker.breaker.picked()
                self._set_pools()
            legs.append(Leg(worker, pick.number))
            self.counters.add("picks_total", 1, _PICKED.get(worker.record.role, _PICKED_OTHER))
        prefill = legs[0] if len(legs) == 2 else None
        return Lease(self, self._leases, self.pick_id, legs[-1], prefill, want.prompt_tokens, taken.predicted_tokens, decision.waited_s)

    def load_changed(self) -> None:
        """Other routers told what they do."""
        self._look_soon()

    def _look_soon(self) -> None:
        """Something may have freed a worker: the queues are looked at once in this turn of the loop."""
        if not self._looking and self.deciding.anybody_waits:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Gives out what may go now."""
        self._looking = self._leaving = False
        now = self.clock()
        for key, queue in self.queues():
            while len(queue) and (found := self.deciding.pump(key, now)) is not None:
                request, decision = found
                waits: Waits = request.tag
                waits.coming.give(self._lease(waits.want, decision))
        for request, wait_s in self.deciding.too_late(now):
            late: Waits = request.tag
            late.coming.fail(errors.all_busy(self.label(late.want.service), now - request.arrived, wait_s))
        self._leave_to_others(now)

    def _set_timer(self) -> None:
        """While requests wait or the index is swept, time alone changes something."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._on_timer)

    def _leave_to_others(self, now: float) -> None:
        """Where better requests wait at other routers, we look again when these had the time to take their turn."""
        if not self._leaving and (at := self.deciding.rivals.look_again_at) < math.inf:
            self._leaving = True
            asyncio.get_running_loop().call_later(max(0.0, at - now), self._look)

    def _on_timer(self) -> None:
        self._timer = None
        self.deciding.tick(self.clock())
        self._look()
        if self.deciding.needs_ticks:
            self._set_timer()

    def _new_worker(self, endpoint: Endpoint) -> Worker:
        record, pod = endpoint.record, endpoint.pod
        assert record is not None
        slot = next(n for n in range(len(self._by_slot) + 1) if n not in self._by_slot)
        key = (pod.namespace, pod.service) if pod is not None else service_of_record(record)
        like = self._like(key, record) if pod is not None else None
        speed = Speed.of(record.profile, record.kv_capacity_tokens)
        if like is not None:
            speed = replace(like.load.speed, kv_capacity_tokens=speed.kv_capacity_tokens)
        load = self.deciding.add_worker(slot, speed, by_history=True, page_tokens=record.page_size)
        if like is not None:
            load.begin_as(like.load)
        worker = Worker(slot, endpoint.host, record, key, pod.name if pod is not None else "", load=load)
        self.workers.append(worker)
        self._by_slot[slot] = worker
        self._by_endpoint[endpoint.key] = worker
        for watcher in self.watchers:
            watcher.added(worker)
        return worker

    def _like(self, key: ServiceKey, record: WorkerRecord) -> Worker | None:
        """Of the pods of its deployment the one whose speed is known best. A new worker is believed to be as fast: what it measured while
        it started beside busy ones says little, and where it looked slower it would never get a request to show better."""
        sort = (record.revision, record.role, record.engine)
        peers = [w for w in self._by_slot.values() if w.service == key and (w.record.revision, w.record.role, w.record.engine) == sort]
        return max(peers, key=lambda w: w.load.seen_s, default=None)

    def _remove(self, key: str, worker: Worker) -> None:
        """The incarnation is over; what is in flight on it stays counted."""
        del self._by_endpoint[key]
        worker.removed = True
        for watcher in self.watchers:
            watcher.gone(worker)
        self.deciding.remove_worker(worker.slot)
        self._set_timer()
        del self._by_slot[worker.slot]
        if not worker.inflight:
            self.workers.remove(worker)

    def _rebuild(self) -> None:
        facts: list[ServiceFacts]
        if self.observed is None:
            facts = static_services(self.workers) if not self.settings.kubernetes else []
        else:
            facts = []
            for f in self.observed.services:
                if f.traffic:
                    self._traffic[f.key] = f.traffic
                facts.append(f if f.traffic else msgspec.structs.replace(f, traffic=self._traffic.get(f.key, [])))
            self._traffic = {key: t for key, t in self._traffic.items() if any(f.key == key for f in facts)}
        self.table.rebuild(facts, self.workers)
        self._set_pools()
        self._wake()
        self.on_table()

    def _set_pools(self) -> None:
        """The deciding half sees the ready workers; requests that wait for a revision without any choose again."""
        pools: dict[Hashable, Pool] = {}
        for key, service in self.table.services.items():
            for revision in service.ready_units():
                pool = self._pool_of(service, revision)
                if pool.is_usable:
                    pools[(key, revision, False)] = pool
        self.deciding.set_pools(pools)
        for queue_key, queue in self.queues():
            if queue_key not in pools:
                for request in list(queue.waiting()):
                    queue.withdraw(request)
                    waits: Waits = request.tag
                    waits.coming.give(None)
        self._look_soon()

    def _wake(self) -> None:
        for waker in self._wakers:
            if not waker.done():
                waker.set_result(None)


def _pool(workers: Collection[Worker], alone: Collection[str]) -> Pool:
    """By role. Args: alone: the roles that answer without a partner; if these are more than the unified, nobody answers with one."""
    parts: dict[str, list[Member]] = {r: [] for r in names.ROLES}
    for w in workers:
        member = Member(w.slot, w.name, w.record.role, w.host, tuple(w.record.transfer_backends))
        if w.record.role in alone:
            parts[names.ROLE_UNIFIED].append(member)
        elif alone == _ALONE:
            parts[w.record.role].append(member)
    return Pool(*(tuple(parts[r]) for r in (names.ROLE_UNIFIED, names.ROLE_PREFILL, names.ROLE_DECODE)))


def _ask(want: Want) -> Ask:
    prompt, answer = (1, 1) if want.any_role else (want.prompt_tokens, 1) if want.prompt_only else (want.prompt_tokens, want.answer_tokens)
    return Ask(prompt, answer, want.key_tokens)
