"""The edge process: data port, brain, registry and load reports on one uvloop event loop. Started by the supervisor.

Loads neither pydantic nor fastapi nor httpx (a test looks at the real process). Answers the control process over the link.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from typing import Final

import uvloop

from fleet_contract.lifeline import die_with_parent
from fleet_contract.logs import set_up_logging
from fleet_router.answers import Answers
from fleet_router.brain import Brain
from fleet_router.encoders import Encoders
from fleet_router.http_client import Pool
from fleet_router.http_server import DataProtocol, Limits, ServerState
from fleet_router.kv_feed.reader import KvReader
from fleet_router.link import LinkServer
from fleet_router.metrics import Counters
from fleet_router.observed import Observed
from fleet_router.process import Handover, raise_file_limit, read_handover
from fleet_router.registry import Endpoint, Registry
from fleet_router.service import DataService
from fleet_router.settings import Settings, split_url

log = logging.getLogger(__name__)

_REQUEST_ID_CHARS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
MAX_REQUEST_ID: Final = 128
RESERVED_FILES: Final = 128  # for what is no client's: logs, link, questions to workers, idle connections, refusals
FILES_PER_REQUEST: Final = 3  # the client's connection and two legs


def make_request_id(given: bytes | None) -> str:
    """The client's X-Request-Id when it is sane, else a new one."""
    if given and len(given) <= MAX_REQUEST_ID and _REQUEST_ID_CHARS.issuperset(given):
        return given.decode("ascii")
    return "req-" + secrets.token_hex(12)


def max_connections(max_files: int) -> int:
    """Clients that can be served at once within a number of open files. Pure."""
    return max(1, (max_files - RESERVED_FILES) // FILES_PER_REQUEST)


class Edge:
    """Wiring of one edge process."""

    def __init__(self, settings: Settings, *, max_files: int) -> None:
        loop = asyncio.get_running_loop()
        self.settings = settings
        self.pool = Pool()
        self.counters = Counters()
        self.brain = Brain(settings, self.counters, loop.time)
        self.encoders = Encoders(self.pool)
        self.registry = Registry(self.pool, poll_interval_s=settings.poll_interval, on_change=self._endpoint_changed, on_load=self.brain.take_load)
        self.brain.poke = self.registry.poke
        self.brain.all_asked = lambda: all(e.asked for e in self.registry.endpoints.values())
        self.brain.on_suspect = self._suspect
        self.kv_reader = KvReader(self.brain)
        self.service = DataService(settings, self.brain, self.encoders, self.pool)
        self.server_state = ServerState(
            Limits(
                settings.max_body_bytes, settings.max_head_bytes, settings.head_timeout, settings.body_timeout,
                settings.idle_timeout, settings.write_timeout, max_connections(max_files),
            ),
            self.service.handle, make_request_id, lambda limit: self.counters.add("limits_total", limit=limit),
        )  # fmt: skip
        answers = Answers(self.brain, self.service, lambda: len(self.server_state.connections))
        self.link = LinkServer(answers.answer, self.take_observed)
        self._server: asyncio.Server | None = None
        self._listener: socket.socket | None = None

    async def start(self, data: socket.socket, link: socket.socket) -> None:
        """Opens the ports."""
        loop = asyncio.get_running_loop()
        self.registry.start()
        self.kv_reader.start()
        await self.link.start(link)
        if self.settings.static:
            self.registry.set_static([split_url(url) for url in self.settings.static])
        self._listener = data
        self._server = await loop.create_server(lambda: DataProtocol(self.server_state), sock=data, backlog=1024)

    async def drain(self) -> None:
        """Not ready, after the delay no new connections, then the running requests, at most for the drain timeout."""
        loop = asyncio.get_running_loop()
        self.brain.draining = True
        log.info("draining", extra={"connections": len(self.server_state.connections)})
        if self.settings.drain_delay:
            await asyncio.sleep(self.settings.drain_delay)
        self.server_state.draining = True
        if self._server is not None and self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # the supervisor holds the socket too: this ends listening for both
            self._server.close()
        for connection in list(self.server_state.connections):
            connection.begin_drain()
        deadline = loop.time() + self.settings.drain_timeout
        while self.server_state.connections and loop.time() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)
        await self.service.aborter.settle()

    async def close(self) -> None:
        await self.link.close()
        await self.registry.close()
        await self.kv_reader.close()
        await self.encoders.close()
        await self.pool.close()

    def take_observed(self, observed: Observed) -> None:
        """A snapshot of discovery: pods first, so that nothing new is picked on one that goes."""
        self.registry.set_pods(observed.pods)
        self.brain.take_observed(observed)

    def _endpoint_changed(self, endpoint: Endpoint) -> None:
        self.brain.take_endpoint(endpoint)
        record = endpoint.record
        if record is not None and endpoint.healthy and not endpoint.removed:
            self.encoders.want(record.model_revision, endpoint.host, endpoint.port)

    def _suspect(self, host: str, port: int, why: str) -> None:
        for endpoint in list(self.registry.endpoints.values()):
            if endpoint.host == host and endpoint.port == port:
                self.registry.suspect(endpoint.key, why)


async def serve(handover: Handover) -> int:
    """The process's life."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's Ctrl-C: the supervisor says what happens
    edge = Edge(handover.settings, max_files=raise_file_limit())
    await edge.start(socket.socket(fileno=handover.listen_fd), socket.socket(fileno=handover.link_fd))
    gc.collect()
    gc.freeze()
    log.info("edge serves", extra={"router_id": handover.settings.router_id})
    await stop.wait()
    await edge.drain()
    await edge.close()
    return 0


def main(argv: list[str]) -> int:
    """Entry of the child process."""
    handover = read_handover(argv)
    die_with_parent(handover.parent_pid)
    set_up_logging("edge", handover.settings.log_level)
    return uvloop.run(serve(handover))


if __name__ == "__main__":
    code = main(sys.argv)
    logging.shutdown()
    os._exit(code)  # nothing is left to do, and no library's thread may hold the end
