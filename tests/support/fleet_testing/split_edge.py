"""An edge and a brain as they are with `--workers` above 1, over the real link, on the test's own event loop."""

from __future__ import annotations

import socket

from fleet_router.brain.answers import Answers
from fleet_router.brain.desk_server import DeskServer
from fleet_router.brain.host import BrainHost
from fleet_router.counters import Counters
from fleet_router.edge.edge import RemoteEdge
from fleet_router.http.client import Pool
from fleet_router.link import LinkServer, edge_link_name, listen
from fleet_router.observed import Observed
from fleet_router.settings import Settings


class SplitEdge(RemoteEdge):
    """Looks like `single.Single`."""

    def __init__(self, settings: Settings, *, max_files: int) -> None:
        super().__init__(settings, index=0, max_files=max_files)
        self.host = BrainHost(settings, Counters(), Pool())
        self.brain = self.host.brain
        self.registry = self.host.registry
        self.server = DeskServer(self.brain, 1, self.host.take_observed)
        self.server.answer = Answers(self.brain, self.server, self.host.static_workers).answer
        self._link = LinkServer(self.server.make_channel)

    async def start(self, data: socket.socket, link: socket.socket, peers: socket.socket | None = None) -> None:  # type: ignore[override]
        """As `Single.start`."""
        name = link.getsockname()[1:].decode()
        self.host.start(peers)
        await self._link.start(link)
        self.server.start()
        await super().start(data, name, listen(edge_link_name(name, 0)))

    async def close(self) -> None:
        await super().close()
        self.server.close()
        await self._link.close()
        await self.host.close()

    def take_observed(self, observed: Observed) -> None:
        """As it comes from the control process."""
        self.host.take_observed(observed)
