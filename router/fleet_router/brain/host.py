"""A brain with all its senses. The same in a process of its own (`brain_process`) and beside one edge (`single`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from fleet_router.brain.brain import Brain
from fleet_router.brain.peers import PeerExchange
from fleet_router.brain.registry import Endpoint, Registry
from fleet_router.brain.static_workers import StaticWorkers
from fleet_router.counters import Counters
from fleet_router.http.client import Pool
from fleet_router.kv_feed.reader import KvReader
from fleet_router.observed import Observed
from fleet_router.settings import Settings, split_url


class BrainHost:
    """Wiring; `on_ready(endpoint)` is told of each worker that answers."""

    def __init__(self, settings: Settings, counters: Counters, pool: Pool, on_ready: Callable[[Endpoint], None] = lambda endpoint: None) -> None:
        self.settings = settings
        self.brain = Brain(settings, counters, asyncio.get_running_loop().time)
        self.registry = Registry(pool, poll_interval_s=settings.poll_interval, on_change=self._endpoint_changed, on_load=self.brain.take_load)
        self.registry.on_polled = self.brain.take_polled
        self.static_workers = StaticWorkers(self.brain, self.registry)
        self._on_ready = on_ready
        self.kv_reader = KvReader(self.brain)
        self._peers: PeerExchange | None = None
        self.brain.poke = self.registry.poke
        self.brain.all_asked = lambda: all(e.has_told for e in self.registry.endpoints.values())
        self.brain.on_suspect = self._suspect

    def start(self, peers: socket.socket | None = None) -> None:
        """Begins to ask workers. Args: peers: the port for other routers, bound and listening; None: there are none."""
        self.registry.start()
        self.kv_reader.start()
        if self.settings.static:
            self.registry.set_static([split_url(url) for url in self.settings.static])
        if peers is not None:
            self._peers = PeerExchange(self.brain)
            self._peers.start(peers)
            self._peers.set_addresses({address: address for address in self.settings.peers})

    async def close(self) -> None:
        self.brain.limits.close()
        await self.registry.close()
        await self.kv_reader.close()
        if self._peers is not None:
            await self._peers.close()

    def take_observed(self, observed: Observed) -> None:
        """A snapshot of discovery: pods first, so that nothing new is picked on one that goes."""
        self.registry.set_pods(observed.pods)
        if self._peers is not None:
            self._peers.set_routers(observed.routers, self.settings.peer_port)
        self.brain.take_observed(observed)

    def _endpoint_changed(self, endpoint: Endpoint) -> None:
        self.brain.take_endpoint(endpoint)
        if endpoint.record is not None and endpoint.healthy and not endpoint.removed:
            self._on_ready(endpoint)

    def _suspect(self, host: str, port: int, why: str) -> None:
        for endpoint in list(self.registry.endpoints.values()):
            if endpoint.host == host and endpoint.port == port:
                self.registry.suspect(endpoint.key, why)
