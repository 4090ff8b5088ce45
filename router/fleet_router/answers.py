"""What the control process asks over the link, answered from the brain and, where a request has to be read, by an edge's service."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleet_contract.worker import ProbeRequest
from fleet_router import reports
from fleet_router.brain import Brain
from fleet_router.link import Ask
from fleet_router.service import DataService


class Answers:
    """Each answer is JSON but for the metrics, which are msgpack of `metrics.Snapshot`."""

    def __init__(self, brain: Brain, service: DataService, connections: Callable[[], int]) -> None:
        self._brain = brain
        self._service = service
        self._connections = connections

    async def answer(self, ask: Ask) -> bytes:
        """Raises ApiError for what cannot be told, ValueError for what is no question."""
        brain = self._brain
        match ask.what:
            case "ready":
                return msgspec.json.encode(self._service.readiness() | {"events": reports.streams(brain)})
            case "metrics":
                return msgspec.msgpack.encode(reports.snapshot(brain, self._connections()))
            case "workers":
                return msgspec.json.encode({"routerId": brain.settings.router_id, "synced": brain.synced, "workers": reports.workers(brain)})
            case "fleet":
                return msgspec.json.encode(reports.fleet(brain, *ask.args))
            case "probe":
                revision = msgspec.json.decode(ask.body, type=ProbeRequest).revision
                return msgspec.json.encode(await self._service.probe(ask.args[0], ask.args[1], revision))
            case "route":
                return msgspec.json.encode(await self._service.explain(ask.body))
            case "decisions":
                return msgspec.json.encode({"decisions": [d.as_json() for d in reversed(brain.decisions)]})
        raise ValueError(f"unknown question {ask.what!r}")
