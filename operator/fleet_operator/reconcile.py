"""One look at one service: observe → validate → plan → apply → status, in that order. Level-based: it may run at any time, any number of times."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from fleet_contract import names
from fleet_operator import status as status_of
from fleet_operator.apply import apply
from fleet_operator.cluster import EVENT, INFERENCE_SERVICE, Cluster
from fleet_operator.errors import ClusterError
from fleet_operator.eventbudget import EventBudget
from fleet_operator.facts import Key, Obj, Observed, rfc3339
from fleet_operator.metrics import Metrics
from fleet_operator.observe import observe
from fleet_operator.plan import Plan, RevisionCollision, plan
from fleet_operator.rollout import Phase
from fleet_operator.routers import Prober, Routers
from fleet_operator.served_names import ServedNames
from fleet_operator.settings import Settings
from fleet_operator.status import Hindrance
from fleet_operator.validate import validate

log = logging.getLogger(__name__)
POLL_DRAIN_S: Final = 0.5
POLL_SOON_S: Final = 1.0
POLL_START_S: Final = 5.0


class Reconciler:
    """Holds what outlives a look: connections, what probes said, who has which name. Nothing that could not be learnt again."""

    def __init__(
        self,
        cluster: Cluster,
        routers: Routers,
        settings: Settings,
        *,
        prober: Prober,
        served: ServedNames,
        metrics: Metrics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster, self._routers, self._settings = cluster, routers, settings
        self._prober, self._served, self._metrics, self._now = prober, served, metrics, now
        self._uids: dict[Key, str] = {}
        self._events = EventBudget()

    async def reconcile(self, key: Key) -> float | None:
        """Does the next step; returns the seconds until the next look, None when only an event or the resync is waited for.

        Raises ClusterError when it should be tried again later.
        """
        try:
            observed = await observe(
                self._cluster,
                self._routers,
                key,
                system_namespace=self._settings.system_namespace,
                probes=self._prober.results,
                name_holder=self._served.holder(key),
            )
        except ClusterError as e:
            await self._tell_unreadable(key, e)
            raise
        self._remember(key, observed)
        if observed is None:
            return None
        try:
            return await self._act(observed)
        except ClusterError as e:
            if e.status == 404:  # deleted under our hands; the next look sees what is left
                return POLL_SOON_S
            raise

    async def _act(self, observed: Observed) -> float | None:
        """Plan, apply and status of what was observed."""
        step, hindrance = self._plan(observed)
        error: ClusterError | None = None
        if step is not None:
            try:
                hindrance = await apply(self._cluster, observed, step)
            except ClusterError as e:
                if e.is_passing:
                    raise
                error, hindrance = e, Hindrance("ApplyFailed", f"the API server refused a change: {e.message}")
            self._ask(observed, step)
        now = self._now()
        status = status_of.derive(observed, step, hindrance, url=self._settings.url, now=now)
        await self._write_status(observed.key, observed.uid, observed.status, status)
        if error is not None:
            raise error
        return next_look(observed, step, hindrance, status, now)

    def _plan(self, observed: Observed) -> tuple[Plan | None, Hindrance | None]:
        spec, violations = validate(observed.key, observed.spec)
        if spec is None:
            return None, Hindrance("InvalidSpec", "; ".join(map(str, violations)) + "; correct the spec and apply it again")
        try:
            return plan(observed, spec, self._settings.defaults, self._now()), None
        except RevisionCollision as e:
            return None, Hindrance("RevisionCollision", f"another spec of this service has revision {e} too; change any annotation in podTemplate")

    def _remember(self, key: Key, observed: Observed | None) -> None:
        """What is known of a service goes with it, also when it is replaced by another of the same name."""
        old = self._uids.pop(key, None)
        if observed is not None:
            self._uids[key] = observed.uid
        if old is not None and (observed is None or observed.uid != old):
            self._prober.forget(old)
            self._events.forget(old)

    def _ask(self, observed: Observed, step: Plan) -> None:
        self._prober.forget(observed.uid, keep=frozenset(revision for revision, _ in step.probe))
        for revision, address in step.probe:
            self._prober.want(observed.key, observed.uid, revision, address)

    async def _write_status(self, key: Key, uid: str, old: Obj, new: dict[str, Any]) -> None:
        if old == new:
            return
        await self._cluster.apply(
            INFERENCE_SERVICE,
            {
                "apiVersion": INFERENCE_SERVICE.api_version,
                "kind": INFERENCE_SERVICE.kind,
                "metadata": {"name": key.name, "namespace": key.namespace, "uid": uid},
                "status": new,
            },
            subresource="status",
        )
        self._metrics.status_writes += 1
        before, after = _ready(old), _ready(new)
        if (before.get("status"), before.get("reason")) != (after["status"], after["reason"]):
            log.info("status", extra={"service": f"{key.namespace}/{key.name}", "ready": after["status"], "reason": after["reason"]})
            await self._record(key, uid, after)

    async def _record(self, key: Key, uid: str, condition: Obj) -> None:
        """One Event per change of Ready's reason, within limits; an Event that cannot be written is no reason to fail."""
        if not self._events.take(uid, self._now()):
            return
        moment = rfc3339(self._now())
        is_bad = condition["status"] != "True" and condition["reason"] not in {p.value for p in Phase} | {
            "Loading",
            "ProbePending",
            "WorkersNotRouted",
        }
        try:
            await self._cluster.record(
                {
                    "apiVersion": EVENT.api_version,
                    "kind": EVENT.kind,
                    "metadata": {"name": f"{key.name}.{uuid.uuid4().hex[:16]}", "namespace": key.namespace},
                    "involvedObject": {
                        "apiVersion": INFERENCE_SERVICE.api_version,
                        "kind": INFERENCE_SERVICE.kind,
                        "name": key.name,
                        "namespace": key.namespace,
                        "uid": uid,
                    },
                    "type": "Warning" if is_bad else "Normal",
                    "reason": condition["reason"],
                    "message": condition["message"],
                    "source": {"component": names.FIELD_MANAGER},
                    "reportingComponent": names.FIELD_MANAGER,
                    "reportingInstance": self._settings.identity,
                    "firstTimestamp": moment,
                    "lastTimestamp": moment,
                    "count": 1,
                }
            )
        except ClusterError as e:
            log.warning("an Event was not written", extra={"service": f"{key.namespace}/{key.name}", "error": e.message})

    async def _tell_unreadable(self, key: Key, error: ClusterError) -> None:
        """Status also when the cluster cannot be read, as far as that works."""
        if error.is_passing:
            return
        try:
            service = await self._cluster.get(INFERENCE_SERVICE, key.namespace, key.name)
            if service is not None and "deletionTimestamp" not in service["metadata"]:
                old, meta = service.get("status") or {}, service["metadata"]
                text = f"the cluster cannot be read: {error.message}; check the operator's rights"
                new = status_of.failure(old, int(meta["generation"]), Hindrance("ClusterUnreadable", text), self._now())
                await self._write_status(key, meta["uid"], old, new)
        except ClusterError as e:
            log.warning("a status was not written", extra={"service": f"{key.namespace}/{key.name}", "error": e.message})


def _ready(status: Obj) -> Obj:
    return next((c for c in status.get("conditions") or () if c.get("type") == "Ready"), {})


def next_look(observed: Observed, step: Plan | None, hindrance: Hindrance | None, status: Obj, now: datetime) -> float | None:
    """Seconds until what no event tells may have changed: a router's view, a deadline. Pure."""
    if hindrance is not None and hindrance.reason in ("WaitingForDeletion", "OwnershipConflict"):
        return POLL_SOON_S if hindrance.reason == "WaitingForDeletion" else POLL_START_S
    if step is None:
        return None
    if step.wake_at is not None:
        return max(0.0, min(POLL_DRAIN_S, (step.wake_at - now).total_seconds()))
    available = next(c for c in status["conditions"] if c["type"] == "Available")
    waits_for_router = any(s.is_serving for s in step.states) and available["status"] != "True"
    if waits_for_router or step.phase in (Phase.SWITCHING, Phase.DRAINING) or step.delete:
        return POLL_SOON_S
    if step.phase is Phase.STARTING and any(step.goal.values()):
        full = all(sum(p.is_ready for p in observed.pods_of(step.target, role)) >= n for role, n in step.goal.items())
        return POLL_SOON_S if full else POLL_START_S
    return None
