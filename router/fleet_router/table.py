"""The table: services, their revisions and workers, and which name means which service. The brain makes it, every edge has a copy.

Facts come from `registry` (records of workers, their health) and discovery; what is derived here is pure. One event loop owns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleet_contract import names
from fleet_contract.worker import WorkerRecord
from fleet_router.observed import ServiceFacts

ServiceKey = tuple[str, str]  # namespace, name
DEFAULT_SERVICE = "default"  # of workers that name none (static mode)


@dataclass(slots=True, eq=False)
class WorkerView:
    """One incarnation of one rank, as an edge sees it. The brain's own form with load and breaker is `worker.Worker`."""

    slot: int
    host: str
    record: WorkerRecord
    service: ServiceKey
    pod: str
    state: str = "starting"
    removed: bool = False

    @property
    def identity(self) -> tuple[str, int, str]:
        return (self.record.pod_uid, self.record.rank, self.record.incarnation)

    @property
    def name(self) -> str:
        """For logs and errors."""
        return self.pod or f"{self.host}:{self.record.ports.internal}"

    @property
    def port(self) -> int:
        return self.record.ports.internal

    @property
    def routable(self) -> bool:
        return self.state == "ready" and not self.removed


W = TypeVar("W", bound=WorkerView)


def service_of_record(record: WorkerRecord) -> ServiceKey:
    """The service a static worker belongs to."""
    return (record.namespace, record.service or DEFAULT_SERVICE)


class Service(Generic[W]):
    """One InferenceService, or one group of static workers."""

    def __init__(self, facts: ServiceFacts, workers: list[W] | None = None) -> None:
        self.facts = facts
        self.key = facts.key
        self.workers = workers if workers is not None else []
        self.adapters: set[str] = set()  # LoRA adapters that some of the workers have
        self._units: dict[str, int] | None = None  # every change of a worker makes a new table
        self._ready_of: dict[str, W | None] = {}  # by revision; as long as `_units`

    @property
    def label(self) -> str:
        """For errors: the name that always works."""
        return f"{self.facts.namespace}/{self.facts.name}" if self.facts.namespace else self.facts.name

    def ready_units(self, exclude: Collection[WorkerView] = ()) -> dict[str, int]:
        """Per revision: unified workers that are ready, plus pairs of a ready prefill and a ready decode of that revision."""
        if not exclude:
            if self._units is None:
                self._units = self._count_units(())
            return self._units
        return self._count_units(exclude)

    def ready_of(self, revision: str) -> W | None:
        """One of a revision's ready workers: all of them have the same model."""
        if revision not in self._ready_of:
            self._ready_of[revision] = next((w for w in self.workers if w.routable and w.record.revision == revision), None)
        return self._ready_of[revision]

    def _count_units(self, exclude: Collection[WorkerView]) -> dict[str, int]:
        counts: dict[str, dict[str, int]] = {}
        for w in self.workers:
            if w.routable and w not in exclude:
                roles = counts.setdefault(w.record.revision, {})
                roles[w.record.role] = roles.get(w.record.role, 0) + 1
        units = {
            rev: roles.get(names.ROLE_UNIFIED, 0) + min(roles.get(names.ROLE_PREFILL, 0), roles.get(names.ROLE_DECODE, 0))
            for rev, roles in counts.items()
        }
        return {rev: n for rev, n in units.items() if n}


class Table(Generic[W]):
    """Services by key and by name."""

    def __init__(self) -> None:
        self.services: dict[ServiceKey, Service[W]] = {}
        self.names: dict[str, ServiceKey] = {}

    def rebuild(self, facts: Iterable[ServiceFacts], workers: Sequence[W]) -> None:
        """Takes the present services and workers; workers of services that are unknown are not routed to."""
        self.services = {f.key: Service(f) for f in facts}
        for w in workers:
            service = self.services.get(w.service)
            if service is not None:
                service.workers.append(w)
                service.adapters.update(w.record.adapters)
        self.names = name_table([s.facts for s in self.services.values()])

    def resolve(self, model: str) -> Service[W] | None:
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


def static_services(workers: Sequence[WorkerView]) -> list[ServiceFacts]:
    """The services that static workers make up; short name and long name come from the records."""
    found: dict[ServiceKey, ServiceFacts] = {}
    for w in workers:
        if w.service not in found:
            short = next((n for n in w.record.served_names if "/" not in n), "") or next(iter(w.record.served_names), "")
            found[w.service] = ServiceFacts(namespace=w.service[0], name=w.service[1], model_name=short, aliases=list(w.record.served_names))
        elif w.record.adapters:
            known = found[w.service].aliases
            known += [name for name in w.record.adapters if name not in known]
    return [found[key] for key in sorted(found)]
