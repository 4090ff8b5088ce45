"""What the brain tells about itself: to the operator, to /workers, to the metrics. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fleet_contract import names
from fleet_contract.worker import FleetReport, FleetRevision, FleetWorker
from fleet_router.brain.registry import Endpoint, worker_state
from fleet_router.brain.worker import Worker
from fleet_router.kv_feed.follow import TRUST
from fleet_router.metrics import Snapshot
from fleet_router.observed import PodFacts
from fleet_router.table import Service

if TYPE_CHECKING:
    from fleet_router.brain.brain import Brain


def fleet(brain: Brain, namespace: str, name: str) -> FleetReport:
    """What the operator asks for."""
    key = (namespace, name)
    service = brain.table.services.get(key)
    queued = {revision: len(queue) for (service_key, revision, _), queue in brain.queues() if service_key == key and len(queue)}
    if service is not None and (n := brain.waiting.get(key, 0)):
        weights = service.facts.traffic
        target = max(weights, key=lambda t: t[1])[0] if weights else next((w.record.revision for w in service.workers), "")
        queued[target] = queued.get(target, 0) + n
    pods = [p for p in brain.observed.pods if (p.namespace, p.service) == key] if brain.observed is not None else []
    return fleet_report(service, router_id=brain.settings.router_id, synced=brain.synced, queued=queued, pods=pods)


def workers(brain: Brain) -> list[dict[str, Any]]:
    """All workers, for /workers; also those that were named, or are pods, and have not told who they are yet. `reason`: why one is not ready."""
    brain.deciding.tick(brain.clock())
    out, reasons = [_unknown(e) for e in brain.unknown_endpoints()], brain.reasons()
    for w in brain.workers:
        load = w.load.now()
        out.append(
            {
                "service": "/".join(w.service), "revision": w.record.revision, "role": w.record.role, "pod": w.pod, "podUid": w.record.pod_uid,
                "rank": w.record.rank, "incarnation": w.record.incarnation, "address": f"{w.host}:{w.port}",
                "state": "failed" if w.removed else w.state, "inflight": w.inflight, "drainDeadline": w.drain_deadline,
                "modelRevision": w.record.model_revision, "pend": load.pend, "run": load.run, "ctx": load.ctx, "kvUsed": load.committed,
                "kvCapacity": w.speed.kv_capacity_tokens, "prefillTokensPerS": w.load.prefill_rate,
                "events": stream_of(brain, w), "breaker": w.breaker.state, "indexedTokens": 0 if w.removed else brain.index.held_tokens(w.slot),
                "reason": reasons.get(w, ""),
            }
        )  # fmt: skip
    return out


def _unknown(endpoint: Endpoint) -> dict[str, Any]:
    """The same for an endpoint that has not told who it is: what discovery or its user says of it."""
    target = endpoint.target
    what = endpoint.pod or PodFacts("", "", "", target.service, target.role, target.revision)
    return {
        "service": f"{what.namespace}/{what.service}", "revision": what.revision, "role": what.role, "pod": what.name, "podUid": what.uid,
        "rank": 0, "incarnation": "", "address": f"{endpoint.host}:{endpoint.port}", "state": worker_state(endpoint, draining=False),
        "inflight": 0, "drainDeadline": endpoint.drain_deadline, "modelRevision": "", "pend": 0, "run": 0, "ctx": 0, "kvUsed": 0,
        "kvCapacity": 0, "prefillTokensPerS": 0.0, "events": {"trust": "none"}, "breaker": "closed", "indexedTokens": 0,
        "reason": endpoint.reason,
    }  # fmt: skip


def stream_of(brain: Brain, worker: Worker) -> dict[str, Any]:
    """How a worker's KV events are read: trust, sequence, lagSeconds, gaps."""
    return brain.stream_of(worker) if brain.stream_of is not None else {"trust": "none"}


def streams(brain: Brain) -> dict[str, int]:
    """How many workers publish KV events, and how many of these streams are believed; for /readyz."""
    trusts = [stream_of(brain, w)["trust"] for w in brain.workers if not w.removed]
    return {"expected": sum(t != "none" for t in trusts), "live": trusts.count("live")}


def snapshot(brain: Brain, connections: int) -> Snapshot:
    """All metrics."""
    states = dict.fromkeys(names.WORKER_STATES, 0)
    for w in brain.workers:
        states["failed" if w.removed else w.state] += 1
    for e in brain.unknown_endpoints():
        states[worker_state(e, draining=False)] += 1
    gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        ("up", ()): 1,
        ("inflight", ()): sum(w.inflight for w in brain.workers),
        ("waiting", ()): sum(brain.waiting.values()) + sum(len(queue) for _, queue in brain.queues()),
        ("connections", ()): connections,
        ("index_keys", ()): len(brain.index),
    }
    gauges |= {("workers", (("state", state),)): n for state, n in states.items()}
    gauges |= {("peers", (("state", state),)): n for state, n in brain.peers().items()}
    told = [stream_of(brain, w) for w in brain.workers if not w.removed]
    gauges |= {("event_streams", (("trust", trust),)): sum(t["trust"] == trust for t in told) for trust in TRUST}
    gauges[("event_lag_seconds", ())] = max((t["lagSeconds"] for t in told if t.get("lagSeconds") is not None), default=0.0)
    return brain.counters.snapshot(gauges)


def fleet_report(
    service: Service[Worker] | None, *, router_id: str, synced: bool, queued: dict[str, int], pods: Sequence[PodFacts] = ()
) -> FleetReport:
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
