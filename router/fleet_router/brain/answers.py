"""What the control process asks over the link: answered from the brain, and where a request has to be read, by an edge's service."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from fleet_router.brain import overview, reports
from fleet_router.brain.brain import Brain
from fleet_router.brain.static_workers import StaticWorkers
from fleet_router.messages import Ask
from fleet_router.metrics import Snapshot


class Edges(Protocol):
    """The HTTP half, wherever it runs."""

    def readiness(self) -> dict[str, Any]:
        """Body of /readyz."""

    def snapshot(self) -> Snapshot:
        """All metrics."""

    async def ask(self, ask: Ask) -> bytes:
        """One of `EdgeAnswers`. Raises ApiError."""

    async def ask_all(self, ask: Ask) -> list[bytes]:
        """The same of every edge; what those say that can. Raises ApiError when one refuses."""


class Answers:
    """Each answer is JSON but for the metrics, which are msgpack of `metrics.Snapshot`."""

    def __init__(self, brain: Brain, edges: Edges, workers: StaticWorkers) -> None:
        self._brain = brain
        self._workers = workers
        self._edges = edges

    async def answer(self, ask: Ask) -> bytes:
        """Raises ApiError for what cannot be told, ValueError for what is no question."""
        brain = self._brain
        match ask.what:
            case "ready":
                return msgspec.json.encode(self._edges.readiness() | {"events": reports.streams(brain), "peers": brain.peers()})
            case "metrics":
                return msgspec.msgpack.encode(self._edges.snapshot())
            case "workers":
                told = {"routerId": brain.settings.router_id, "synced": brain.synced, "workers": reports.workers(brain)}
                return msgspec.json.encode(told)
            case "queue":
                return msgspec.json.encode({"queues": overview.queues(brain)})
            case "overview":
                return msgspec.json.encode(overview.overview(brain, self._edges.snapshot()))
            case "fleet":
                return msgspec.json.encode(reports.fleet(brain, *ask.args))
            case "probe" | "route" | "flush":
                return await self._edges.ask(ask)
            case "abort":
                counts = [msgspec.json.decode(said)["aborted"] for said in await self._edges.ask_all(ask)]
                return msgspec.json.encode({"aborted": sum(counts)})
            case "decisions":
                return msgspec.json.encode({"decisions": [d.as_json() for d in reversed(brain.decisions)]})
        return self._workers.answer(ask.what, ask.args, ask.body)
