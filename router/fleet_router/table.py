"""The brain's table: services, their revisions and workers, and which name means which service.

Facts come from `registry` (records of workers, their health) and discovery; what is derived here is pure. One event loop owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fleet_contract import names
from fleet_contract.worker import FleetReport, FleetRevision, FleetWorker, WorkerRecord
from fleet_router.decide.load import SlotLoad, Speed
from fleet_router.decide.retry import Breaker
from fleet_router.observed import PodFacts, ServiceFacts

ServiceKey = tuple[str, str]  # namespace, name
DEFAULT_SERVICE = "default"  # of workers that name none (static mode)


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of one rank. It lives until it is removed and has no request in flight."""

    slot: int
    host: str
    record: WorkerRecord
    service: ServiceKey
    pod: str
    load: SlotLoad
    state: str = "starting"
    drain_deadline: str | None = None
    removed: bool = False
    inflight: int = 0
    faults: int = 0
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def identity(self) -> tuple[str, int, str]:
        return (self.record.pod_uid, self.record.rank, self.record.incarnation)

    @property
    def name(self) -> str:
        """For logs and errors."""
        return self.pod or f"{self.host}:{self.record.ports.internal}"

    @property
    def speed(self) -> Speed:
        return self.load.speed

    @property
    def says_draining(self) -> bool:
        """By its own load report."""
        return self.load.report is not None and self.load.report.draining

    def learn_step(self, seconds: float, tokens: int) -> None:
        """An answer of so many tokens after its first took so long."""
        self.load.learn_step(seconds, tokens)

    @property
    def port(self) -> int:
        return self.record.ports.internal

    @property
    def routable(self) -> bool:
        return self.state == "ready" and not self.removed


def service_of_record(record: WorkerRecord) -> ServiceKey:
    """The service a static worker belongs to."""
    return (record.namespace, record.service or DEFAULT_SERVICE)


@dataclass(slots=True)
class Service:
    """One InferenceService, or one group of static workers."""

    facts: ServiceFacts
    workers: list[Worker] = field(default_factory=list)

    @property
    def label(self) -> str:
        """For errors: the name that always works."""
        return f"{self.facts.namespace}/{self.facts.name}" if self.facts.namespace else self.facts.name

    def ready_units(self) -> dict[str, int]:
        """Per revision: unified workers that are ready, plus pairs of a ready prefill and a ready decode of that revision."""
        counts: dict[str, dict[str, int]] = {}
        for w in self.workers:
            if w.routable:
                roles = counts.setdefault(w.record.revision, {})
                roles[w.record.role] = roles.get(w.record.role, 0) + 1
        units = {
            rev: roles.get(names.ROLE_UNIFIED, 0) + min(roles.get(names.ROLE_PREFILL, 0), roles.get(names.ROLE_DECODE, 0))
            for rev, roles in counts.items()
        }
        return {rev: n for rev, n in units.items() if n}


class Table:
    """Services by key and by name."""

    def __init__(self) -> None:
        self.services: dict[ServiceKey, Service] = {}
        self.names: dict[str, ServiceKey] = {}

    def rebuild(self, facts: Iterable[ServiceFacts], workers: Sequence[Worker]) -> None:
        """Takes the present services and workers; workers of services that are unknown are not routed to."""
        self.services = {f.key: Service(f) for f in facts}
        for w in workers:
            service = self.services.get(w.service)
            if service is not None:
                service.workers.append(w)
        self.names = name_table([s.facts for s in self.services.values()])

    def resolve(self, model: str) -> Service | None:
        """The service that a request's `model` names."""
        key = self.names.get(model)
        return self.services.get(key) if key is not None else None


def name_table(services: Sequence[ServiceFacts]) -> dict[str, ServiceKey]:
    """`<namespace>/<name>` always works; the short served name belongs to the oldest service that asks for it."""
    out: dict[str, ServiceKey] = {}
    for f in sorted(services, key=lambda f: (f.created, f.namespace, f.name)):
        out.setdefault(f.model_name or f.name, f.key)
    for f in services:
        if f.namespace:
            out[f"{f.namespace}/{f.name}"] = f.key
        for alias in f.aliases:
            out.setdefault(alias, f.key)
    return out


def static_services(workers: Sequence[Worker]) -> list[ServiceFacts]:
    """The services that static workers make up; short name and long name come from the records."""
    found: dict[ServiceKey, ServiceFacts] = {}
    for w in workers:
        if w.service not in found:
            short = next((n for n in w.record.served_names if "/" not in n), "") or next(iter(w.record.served_names), "")
            found[w.service] = ServiceFacts(namespace=w.service[0], name=w.service[1], model_name=short, aliases=list(w.record.served_names))
    return [found[key] for key in sorted(found)]


def fleet_report(service: Service | None, *, router_id: str, synced: bool, queued: dict[str, int], pods: Sequence[PodFacts] = ()) -> FleetReport:
    """What the operator reads about one service.

    A removed worker is listed until it has nothing in flight; a pod that has not told its record yet is listed too, so that the
    operator sees its drain echoed.
    """
    if service is None:
        return FleetReport(router_id=router_id, synced=synced)
    weights = dict(service.facts.traffic)
    revisions: dict[str, FleetRevision] = {
        rev: FleetRevision(weight=weights.get(rev, 0), queued=queued.get(rev, 0)) for rev in sorted(weights.keys() | queued.keys()) if rev
    }
    for w in service.workers:
        if w.removed and not w.inflight:
            continue
        revision = revisions.setdefault(w.record.revision, FleetRevision(queued=queued.get(w.record.revision, 0)))
        revision.workers.append(
            FleetWorker(
                pod_uid=w.record.pod_uid,
                pod=w.pod,
                role=w.record.role,
                rank=w.record.rank,
                state="failed" if w.removed else w.state,
                inflight=w.inflight,
                drain_deadline=w.drain_deadline,
            )
        )
    told = {w.record.pod_uid for w in service.workers if not w.removed}
    for p in pods:
        if p.uid not in told:
            state = "failed" if p.terminal else "draining" if p.deleting or p.drain_deadline is not None else "starting"
            entry = FleetWorker(pod_uid=p.uid, pod=p.name, role=p.role, state=state, drain_deadline=p.drain_deadline)
            revisions.setdefault(p.revision, FleetRevision(queued=queued.get(p.revision, 0))).workers.append(entry)
    if not weights:  # none published: what the router does by itself
        units = service.ready_units()
        total = sum(units.values())
        for rev, n in units.items():
            revisions[rev].weight = round(100 * n / total)
    return FleetReport(
        router_id=router_id, synced=synced, observed_generation=service.facts.generation, revisions=revisions,
    )  # fmt: skip
