"""Owns table, index, load and choice. The edge asks it for a lease, discovery and registry feed it; it does no HTTP of its own.

One event loop. A choice counts its request before anything is awaited, and a lease gives the count back exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from fleet_contract import names
from fleet_contract.worker import FleetReport, LoadReport
from fleet_router import choice, errors
from fleet_router.choice import Ask, Candidate, Speed, Terms
from fleet_router.load import Pick
from fleet_router.metrics import Counters, Snapshot
from fleet_router.observed import Observed, ServiceFacts
from fleet_router.prefix_index import PrefixIndex
from fleet_router.registry import Endpoint, worker_state
from fleet_router.settings import Settings
from fleet_router.table import Service, ServiceKey, Table, Worker, fleet_report, service_of_record, static_services

log = logging.getLogger(__name__)

KEPT_DECISIONS: Final = 64
FAULT_PENALTY_S: Final = 1.0
MAX_FAULTS: Final = 5


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice with all its terms, for /debug/route."""

    service: str
    revision: str
    prompt_tokens: int
    answer_tokens: int
    chosen: tuple[int, ...]
    terms: tuple[tuple[str, str, Terms], ...]  # worker, role, terms
    request_id: str = ""

    def as_json(self) -> dict[str, Any]:
        """What /debug/route shows."""
        return {
            "service": self.service,
            "revision": self.revision,
            "promptTokens": self.prompt_tokens,
            "answerTokens": self.answer_tokens,
            "requestId": self.request_id,
            "workers": [
                {
                    "worker": name, "role": role, "chosen": t.slot in self.chosen, "hitTokens": t.hit_tokens, "costSeconds": t.total,
                    "wait": t.wait, "work": t.work, "decode": t.decode, "room": t.room, "penalty": t.penalty,
                }
                for name, role, t in self.terms
            ],
        }  # fmt: skip


@dataclass(slots=True, eq=False)
class Leg:
    """One worker's part of a lease."""

    worker: Worker
    pick: Pick
    released: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """The workers chosen for one attempt, counted until `release`. Use as a context manager."""

    brain: Brain
    serving: Leg  # gives the client's answer
    prefill: Leg | None
    predicted_tokens: int
    prompt_tokens: int

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def legs(self) -> list[Leg]:
        return [self.serving] if self.prefill is None else [self.prefill, self.serving]

    def release(self) -> None:
        """Gives all counts back; again is nothing."""
        for leg in self.legs():
            self.release_leg(leg)

    def release_leg(self, leg: Leg) -> None:
        """One worker has nothing more to do for this request."""
        if not leg.released:
            leg.released = True
            self.brain.give_back(leg)

    def first_token(self) -> None:
        """The prompt is computed: it is no waiting work any more."""
        for leg in self.legs():
            leg.pick.started = True

    def cached(self, tokens: int) -> None:
        """What the worker really had cached."""
        leg = self.prefill or self.serving
        self.brain.learn(leg.worker, self.predicted_tokens, tokens, self.prompt_tokens)


@dataclass(slots=True)
class Want:
    """What a request needs of a choice."""

    service: ServiceKey
    ask: Ask
    revision: str
    keys: tuple[int, ...] = ()
    exclude: Collection[Worker] = field(default_factory=tuple)
    request_id: str = ""
    any_role: bool = False  # no generation: every ready worker can answer


class Brain:
    """See the module."""

    def __init__(self, settings: Settings, counters: Counters, clock: Callable[[], float], draw: Callable[[int], int] | None = None) -> None:
        self.settings = settings
        self.counters = counters
        self.table = Table()
        self.index = PrefixIndex()
        self.pick_id = f"{settings.router_id}.{secrets.token_hex(4)}"  # of this process life: numbers start again at 0
        self.poke: Callable[[str], None] = lambda key: None
        self.all_asked: Callable[[], bool] = lambda: False
        self.decisions: deque[Decision] = deque(maxlen=KEPT_DECISIONS)
        self.waiting: dict[ServiceKey, int] = {}
        self.draining = False
        self._synced = False
        self._clock = clock
        self._draw = draw or random.Random(secrets.randbits(64)).randrange
        self._workers: list[Worker] = []
        self._by_endpoint: dict[str, Worker] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._slots: set[int] = set()
        self._observed: Observed | None = None
        self._traffic: dict[ServiceKey, list[tuple[str, int]]] = {}
        self._wakers: set[asyncio.Future[None]] = set()

    # -- facts in

    def take_observed(self, observed: Observed) -> None:
        """A new snapshot of discovery."""
        self._observed = observed
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
            draining = worker.book.report is not None and worker.book.report.draining
            worker.state = worker_state(endpoint, draining=draining)
            worker.drain_deadline = endpoint.pod.drain_deadline if endpoint.pod is not None else None
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
            was_draining = worker.book.report is not None and worker.book.report.draining
            worker.book.take_report(report, self.pick_id, self._clock())
            if report.draining != was_draining:
                self.take_endpoint(self._endpoints[key])
            return

    @property
    def synced(self) -> bool:
        """Since its start this process has once held all that discovery knew, with every endpoint asked. It stays so.

        Static workers are not known before they answer: there at least one unit has to be ready.
        """
        if not self._synced and self.all_asked():
            if self.settings.kubernetes:
                self._synced = self._observed is not None
            else:
                self._synced = any(s.ready_units() for s in self.table.services.values())
        return self._synced

    # -- choice

    def choose_revision(self, service: Service, exclude: Collection[Worker] = ()) -> str | None:
        """A revision with ready workers, by the operator's weights."""
        units = service.ready_units()
        if exclude:
            units = {rev: n for rev, n in units.items() if self._pools(service, rev, exclude) is not None}
        return choice.choose_revision(service.facts.traffic, units, self._draw)

    def pick(self, want: Want) -> Lease | None:
        """Chooses and counts. None when no worker is ready."""
        service = self.table.services.get(want.service)
        decision = self._decide(service, want) if service is not None else None
        if service is None or decision is None:
            return None
        by_slot = {w.slot: w for w in service.workers if not w.removed}
        self.decisions.append(decision)
        hits = {t.slot: t.hit_tokens for _, _, t in decision.terms}
        legs: list[Leg] = []
        for slot in decision.chosen:
            worker = by_slot[slot]
            does_prompt = worker.record.role != names.ROLE_DECODE
            pend = max(0, want.ask.prompt_tokens - hits[slot]) if does_prompt and not want.any_role else 0
            pick = worker.book.pick(pend, want.ask.prompt_tokens + (want.ask.answer_tokens if worker.record.role != names.ROLE_PREFILL else 0))
            worker.inflight += 1
            legs.append(Leg(worker, pick))
            self.index.insert(slot, want.keys)
            self.counters.add("picks_total", role=worker.record.role if worker.record.role in names.ROLES else "other")
        return Lease(self, legs[-1], legs[0] if len(legs) == 2 else None, hits[legs[0].worker.slot], want.ask.prompt_tokens)

    def explain(self, want: Want) -> Decision | None:
        """The decision that `pick` would make now, without making it."""
        service = self.table.services.get(want.service)
        return self._decide(service, want) if service is not None else None

    def give_back(self, leg: Leg) -> None:
        """A leg is over."""
        worker = leg.worker
        worker.inflight -= 1
        assert worker.inflight >= 0, worker.name
        worker.book.release(leg.pick)
        if worker.removed and not worker.inflight:
            self._workers.remove(worker)
            self._rebuild()

    def learn(self, worker: Worker, predicted: int, actual: int, prompt: int) -> None:
        """Compares the index with what a worker had cached."""
        self.counters.add("prompt_tokens_total", prompt)
        self.counters.add("predicted_cached_tokens_total", predicted)
        self.counters.add("cached_tokens_total", actual)
        if not worker.removed:
            self.index.feedback(worker.slot, predicted, actual)

    def blame(self, worker: Worker) -> None:
        """A fault of the worker itself: others are preferred until it answers well again."""
        worker.faults = min(MAX_FAULTS, worker.faults + 1)

    def praise(self, worker: Worker) -> None:
        worker.faults = 0

    async def wait_change(self, service: Service, timeout_s: float) -> None:
        """Waits until something in the table changed, or the time is over. The caller counts as queued. Raises ApiError when too many wait."""
        key = service.facts.key
        if sum(self.waiting.values()) >= self.settings.max_queue:
            raise errors.queue_full(service.label, self.settings.max_queue)
        self.waiting[key] = self.waiting.get(key, 0) + 1
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wakers.add(waker)
        try:
            await asyncio.wait([waker], timeout=timeout_s)
        finally:
            self._wakers.discard(waker)
            self.waiting[key] -= 1
            if not self.waiting[key]:
                del self.waiting[key]

    # -- reports

    def fleet(self, namespace: str, name: str) -> FleetReport:
        """What the operator asks for."""
        key = (namespace, name)
        service = self.table.services.get(key)
        queued: dict[str, int] = {}
        if service is not None and (n := self.waiting.get(key, 0)):
            weights = service.facts.traffic
            target = max(weights, key=lambda t: t[1])[0] if weights else next((w.record.revision for w in service.workers), "")
            queued[target] = n
        pods = [p for p in self._observed.pods if (p.namespace, p.service) == key] if self._observed is not None else []
        return fleet_report(service, router_id=self.settings.router_id, synced=self.synced, queued=queued, pods=pods)

    def workers(self) -> list[dict[str, Any]]:
        """All workers, for /workers."""
        now = self._clock()
        out: list[dict[str, Any]] = []
        for w in self._workers:
            load = w.book.load(now)
            out.append(
                {
                    "service": "/".join(w.service), "revision": w.record.revision, "role": w.record.role, "pod": w.pod, "podUid": w.record.pod_uid,
                    "rank": w.record.rank, "incarnation": w.record.incarnation, "address": f"{w.host}:{w.port}",
                    "state": "failed" if w.removed else w.state, "inflight": w.inflight, "drainDeadline": w.drain_deadline,
                    "modelRevision": w.record.model_revision, "pend": load.pend, "run": load.run, "ctx": load.ctx, "kvUsed": load.kv_used,
                    "kvCapacity": w.speed.kv_capacity_tokens, "indexedTokens": 0 if w.removed else self.index.held_tokens(w.slot),
                }
            )  # fmt: skip
        return out

    def snapshot(self, connections: int) -> Snapshot:
        """All metrics."""
        states = dict.fromkeys(names.WORKER_STATES, 0)
        for w in self._workers:
            states["failed" if w.removed else w.state] += 1
        gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
            ("up", ()): 1,
            ("inflight", ()): sum(w.inflight for w in self._workers),
            ("waiting", ()): sum(self.waiting.values()),
            ("connections", ()): connections,
            ("index_keys", ()): len(self.index),
        }
        gauges |= {("workers", (("state", state),)): n for state, n in states.items()}
        return self.counters.snapshot(gauges)

    # -- inside

    def _pools(self, service: Service, revision: str, exclude: Collection[Worker]) -> tuple[list[Worker], list[Worker], list[Worker]] | None:
        """Ready unified, prefill and decode workers of a revision; None when they cannot serve."""
        pools: dict[str, list[Worker]] = {r: [] for r in names.ROLES}
        for w in service.workers:
            if w.routable and w.record.revision == revision and w not in exclude and w.record.role in pools:
                pools[w.record.role].append(w)
        unified, prefill, decode = (pools[r] for r in (names.ROLE_UNIFIED, names.ROLE_PREFILL, names.ROLE_DECODE))
        return (unified, prefill, decode) if unified or (prefill and decode) else None

    def _decide(self, service: Service | None, want: Want) -> Decision | None:
        pools = self._pools(service, want.revision, want.exclude) if service is not None else None
        if service is None or pools is None:
            return None
        now = self._clock()
        hits = self.index.lookup(want.keys) if want.keys else {}

        def candidate(w: Worker) -> Candidate:
            return Candidate(w.slot, w.speed, w.book.load(now), hits.get(w.slot, 0), w.faults * FAULT_PENALTY_S)

        unified, prefill, decode = pools
        u = [choice.unified_terms(candidate(w), want.ask) for w in (unified if not want.any_role else [*unified, *prefill, *decode])]
        p = [choice.prefill_terms(candidate(w), want.ask) for w in prefill] if not want.any_role else []
        d = [choice.decode_terms(candidate(w), want.ask) for w in decode] if p else []
        best = choice.choose(u, self._draw) if u else None
        chosen: tuple[int, ...] = (best.slot,) if best is not None else ()
        if p and d:
            pair = (choice.choose(p, self._draw), choice.choose(d, self._draw))
            if best is None or pair[0].total + pair[1].total < best.total:
                chosen = (pair[0].slot, pair[1].slot)
        by_slot = {w.slot: w for w in service.workers if not w.removed}
        terms = tuple((by_slot[t.slot].name, by_slot[t.slot].record.role, t) for t in (*u, *p, *d))
        return Decision(service.label, want.revision, want.ask.prompt_tokens, want.ask.answer_tokens, chosen, terms, want.request_id)

    def _new_worker(self, endpoint: Endpoint) -> Worker:
        record, pod = endpoint.record, endpoint.pod
        assert record is not None
        slot = next(n for n in range(len(self._slots) + 1) if n not in self._slots)
        self._slots.add(slot)
        key = (pod.namespace, pod.service) if pod is not None else service_of_record(record)
        worker = Worker(slot, endpoint.host, record, key, pod.name if pod is not None else "", Speed.of(record.profile, record.kv_capacity_tokens))
        self._workers.append(worker)
        self._by_endpoint[endpoint.key] = worker
        self.index.add_slot(slot, record.kv_capacity_tokens)
        return worker

    def _remove(self, key: str, worker: Worker) -> None:
        """The incarnation is over; what is in flight on it stays counted."""
        del self._by_endpoint[key]
        worker.removed = True
        self.index.remove_slot(worker.slot)
        self._slots.discard(worker.slot)
        if not worker.inflight:
            self._workers.remove(worker)

    def _rebuild(self) -> None:
        facts: list[ServiceFacts]
        if self._observed is None:
            facts = static_services(self._workers) if not self.settings.kubernetes else []
        else:
            facts = []
            for f in self._observed.services:
                if f.traffic:
                    self._traffic[f.key] = f.traffic
                facts.append(f if f.traffic else msgspec.structs.replace(f, traffic=self._traffic.get(f.key, [])))
            self._traffic = {key: t for key, t in self._traffic.items() if any(f.key == key for f in facts)}
        self.table.rebuild(facts, self._workers)
        self._wake()

    def _wake(self) -> None:
        for waker in self._wakers:
            if not waker.done():
                waker.set_result(None)
