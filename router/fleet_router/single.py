"""One edge with its brain in the same process and on the same event loop: the router of `--workers 1`, without a socket between them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

from fleet_router import compiled
from fleet_router.brain import reports
from fleet_router.brain.answers import Answers
from fleet_router.brain.brain import Brain
from fleet_router.brain.host import BrainHost
from fleet_router.brain.registry import Endpoint
from fleet_router.counters import Counters
from fleet_router.edge.answers import EdgeAnswers
from fleet_router.edge.edge import Edge
from fleet_router.edge.quota import QuotaReports
from fleet_router.garbage import Sweeper
from fleet_router.http.client import Pool
from fleet_router.link import Channel, LinkServer
from fleet_router.messages import Ask, Message, News
from fleet_router.metrics import Snapshot
from fleet_router.observed import Observed
from fleet_router.process import Handover, on_stop, raise_file_limit
from fleet_router.settings import Settings

_EDGE = "here"
log = logging.getLogger(__name__)


class LocalEdge:
    """The one edge of a brain in the same process, as `Edges`."""

    def __init__(self, brain: Brain, answers: EdgeAnswers, connections: Callable[[], int]) -> None:
        self._brain = brain
        self._answers = answers
        self._connections = connections

    def readiness(self) -> dict[str, Any]:
        return self._answers.readiness()

    def snapshot(self) -> Snapshot:
        return reports.snapshot(self._brain, self._connections())

    async def ask(self, ask: Ask) -> bytes:
        return await self._answers.answer(ask)

    async def ask_all(self, ask: Ask) -> list[bytes]:
        return [await self._answers.answer(ask)]


class Single(Edge):
    """Edge and brain."""

    def __init__(self, settings: Settings, *, max_files: int) -> None:
        pool = Pool()
        self.host = BrainHost(settings, Counters(), pool, self._worker_ready)
        self.brain = self.host.brain
        self.registry = self.host.registry
        super().__init__(settings, self.brain, pool, max_files=max_files)
        self._quota = QuotaReports(self.access.callers, lambda uses: self.brain.limits.take(_EDGE, uses))
        answers = Answers(self.brain, LocalEdge(self.brain, self.answers, self.connections), self.host.static_workers)
        self.link = LinkServer(lambda: Channel(self._take, lambda channel: None, answers.answer))

    async def start(self, data: socket.socket, link: socket.socket, peers: socket.socket | None = None) -> None:
        """Opens the ports."""
        self._quota.start()
        self.brain.limits.join(_EDGE, self._quota.take)
        self.host.start(peers)
        await self.link.start(link)
        await self.open(data)

    async def close(self) -> None:
        self._quota.close()
        await self.link.close()
        await self.host.close()
        await super().close()

    def take_observed(self, observed: Observed) -> None:
        """A snapshot of discovery."""
        self.host.take_observed(observed)

    def _take(self, channel: Channel, message: Message) -> None:
        if not isinstance(message, News):
            raise ValueError(f"{type(message).__name__} without edges of their own")
        self.take_observed(message.observed)

    def _worker_ready(self, endpoint: Endpoint) -> None:
        assert endpoint.record is not None
        self.encoders.want(endpoint.record, endpoint.host)


async def serve(handover: Handover) -> int:
    """The process's life."""
    stop = on_stop(handover)
    edge = Single(handover.settings, max_files=raise_file_limit())
    await edge.start(socket.socket(fileno=handover.listen_fd), socket.socket(fileno=handover.link_fd), handover.peer_socket())
    Sweeper().start()
    log.info("edge serves", extra={"router_id": handover.settings.router_id, "compiled": compiled.is_used()})
    await stop.wait()
    await edge.drain()
    await edge.close()
    return 0
