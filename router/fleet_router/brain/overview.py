"""One picture of the whole router, for the dashboard and `radixfleet top`; and the queues in words, for /debug/queue. Reads only."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final

from fleet_router.brain import reports

if TYPE_CHECKING:
    from fleet_router.brain.brain import Brain, Key
    from fleet_router.decide.queue import CacheQueue
    from fleet_router.metrics import Snapshot

SHOWN_DECISIONS: Final = 20
SHOWN_WAITING: Final = 100  # requests of each queue
SUMS: Final = (
    "requests_total", "picks_total", "retries_total", "client_gone_total",
    "prompt_tokens_total", "predicted_cached_tokens_total", "cached_tokens_total",
)  # fmt: skip


def queues(brain: Brain) -> list[dict[str, Any]]:
    """Every pool in which requests wait because its workers are busy, oldest request first."""
    return [_queue(brain, key, queue) for key, queue in brain.queues() if len(queue)]


def _queue(brain: Brain, key: Key, queue: CacheQueue) -> dict[str, Any]:
    now = brain.clock()
    (namespace, name), revision, _ = key
    waiting = sorted(queue.waiting(), key=lambda r: r.arrived)
    wait_s = queue.predicted_wait_s()
    return {
        "service": f"{namespace}/{name}" if namespace else name,
        "revision": revision,
        "waiting": len(waiting),
        "maxRequests": queue.rules.max_requests,
        "bytes": queue.size_bytes,
        "maxBytes": queue.rules.max_bytes,
        "predictedWaitSeconds": wait_s if math.isfinite(wait_s) else None,
        "oldestSeconds": now - waiting[0].arrived,
        "requests": [
            {
                "requestId": r.tag.want.request_id, "class": r.klass, "tenant": r.tenant, "promptTokens": r.ask.prompt_tokens,
                "answerTokens": r.ask.answer_tokens, "waitedSeconds": now - r.arrived, "leftSeconds": r.deadline - now,
            }
            for r in waiting[:SHOWN_WAITING]
        ],
    }  # fmt: skip


def overview(brain: Brain, snapshot: Snapshot) -> dict[str, Any]:
    """Workers, services, queues, sums since the start, the last decisions. Args: snapshot: of all processes."""
    sums = dict.fromkeys(SUMS, 0.0)
    statuses: dict[str, float] = {}
    for counter, labels, value in snapshot.counters:
        if counter in sums:
            sums[counter] += value
        if counter == "requests_total":
            status = dict(labels)["status"]
            statuses[status] = statuses.get(status, 0) + value
    return {
        "routerId": brain.settings.router_id,
        "at": time.time(),
        "synced": brain.synced,
        "draining": brain.draining,
        "gauges": {name: value for name, labels, value in snapshot.gauges if not labels},
        "sums": {name.removesuffix("_total"): value for name, value in sums.items()},
        "statuses": statuses,
        "services": _services(brain),
        "workers": reports.workers(brain),
        "queues": queues(brain),
        "decisions": [_short(d.as_json()) for d in list(reversed(brain.decisions))[:SHOWN_DECISIONS]],
    }


def _services(brain: Brain) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    names = {key: name for name, key in sorted(brain.table.names.items(), reverse=True) if "/" not in name}
    for key, service in sorted(brain.table.services.items()):
        report = reports.fleet(brain, *key)
        units = service.ready_units()
        out.append(
            {
                "service": service.label,
                "model": names.get(key, service.label),
                "revisions": [
                    {"revision": rev, "weight": r.weight, "readyUnits": units.get(rev, 0), "queued": r.queued} for rev, r in report.revisions.items()
                ],
            }
        )
    return out


def _short(decision: dict[str, Any]) -> dict[str, Any]:
    """A decision without the terms of the workers that were not chosen."""
    chosen = [w for w in decision.pop("workers") if w["chosen"]]
    hits = [w["hitTokens"] for w in chosen if w["role"] != "decode"]
    return decision | {"chosen": [w["worker"] for w in chosen], "hitTokens": max(hits, default=0)}
