"""An edge: the data port on one uvloop event loop, in front of a desk. Its process is started by the supervisor.

With several edges the desk is a `RemoteDesk`, and the process loads neither the brain nor numpy; a single edge has the brain beside it
(`single`). Neither loads pydantic, fastapi or httpx (tests look at the real processes).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from typing import Final

import uvloop

from fleet_contract.lifeline import die_with_parent
from fleet_contract.logs import set_up_logging
from fleet_router import compiled
from fleet_router.api.dialects import dialect_of
from fleet_router.counters import Counters
from fleet_router.desk import Desk
from fleet_router.edge.access import HANDSHAKE_TIMEOUT_S, Access
from fleet_router.edge.answers import EdgeAnswers
from fleet_router.edge.encoders import Encoders
from fleet_router.edge.quota import QuotaReports
from fleet_router.edge.remote_desk import RemoteDesk
from fleet_router.edge.service import DataService
from fleet_router.edge.traces import Traces
from fleet_router.garbage import Sweeper
from fleet_router.http.client import Pool
from fleet_router.http.listening import listen_on
from fleet_router.http.request import Limits
from fleet_router.http.server import DataProtocol, ServerState
from fleet_router.identifiers import make_request_id
from fleet_router.link import Channel, LinkServer, edge_link_name, listen
from fleet_router.messages import Ask
from fleet_router.process import Handover, on_stop, raise_file_limit, read_handover
from fleet_router.settings import Settings
from fleet_router.table import WorkerView
from fleet_text.chains import MAX_BYTES

log = logging.getLogger(__name__)

RESERVED_FILES: Final = 128  # for what is no client's: logs, link, questions to workers, idle connections, refusals
FILES_PER_REQUEST: Final = 3  # the client's connection and two legs
TABLE_WAIT_S: Final = 5.0
DELAYS_UNTIL_QUIET: Final = 10  # drain delays after which a load balancer that still sends is not waited for
DELAYS_IDLE: Final = 3  # drain delays that an idle connection is kept: with 3 s longer than clients usually keep one (httpx: 5 s)


def max_connections(max_files: int) -> int:
    """Clients that can be served at once within a number of open files. Pure."""
    return max(1, (max_files - RESERVED_FILES) // FILES_PER_REQUEST)


class Edge:
    """Wiring of the HTTP half."""

    def __init__(self, settings: Settings, desk: Desk, pool: Pool, *, max_files: int) -> None:
        self.settings = settings
        self.desk = desk
        self.pool = pool
        self.counters: Counters = desk.counters
        self.encoders = Encoders(pool, chat_bytes=MAX_BYTES // max(1, settings.workers))
        self.access = Access(settings, asyncio.get_running_loop().time, share=1 / max(1, settings.workers))
        self.traces = Traces(settings.otlp_endpoint, settings.router_id) if settings.otlp_endpoint else None
        self.service = DataService(settings, desk, self.encoders, pool, self.access, self.traces)
        self.answers = EdgeAnswers(self.service)
        self.server_state = ServerState(
            Limits(
                settings.max_body_bytes, settings.max_head_bytes, settings.head_timeout, settings.body_timeout,
                settings.idle_timeout, settings.write_timeout, max_connections(max_files), settings.max_held_bytes // settings.workers,
            ),
            self.service.handle, make_request_id, lambda limit: self.counters.add("limits_total", 1, (("limit", limit),)),
            lambda path, error, request_id: dialect_of(path).error_body(error, request_id), self.access.cors_lines,
            outbox=pool.outbox,
        )  # fmt: skip
        self._servers: list[asyncio.Server] = []
        self._listener: socket.socket | None = None

    def connections(self) -> int:
        """Clients that are connected now."""
        return len(self.server_state.connections)

    async def open(self, data: socket.socket) -> None:
        """Serves the data port: a bound socket, listening or not yet."""
        self._listener = data
        self.access.start()
        tls = self.access.tls
        limit = HANDSHAKE_TIMEOUT_S if tls is not None else None
        self._servers = await listen_on(data, lambda: DataProtocol(self.server_state), tls=tls, handshake_s=limit)

    def stop_accepting(self) -> None:
        """New clients are refused. The supervisor may hold the socket too: this ends listening for both."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for server in self._servers:
            server.close()

    async def drain(self) -> None:
        """Not ready; when no request has come for the delay, no new connections; then what runs and what idle clients still send, at most
        for the drain timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.drain_delay + self.settings.drain_timeout
        self.desk.draining = True
        log.info("draining", extra={"connections": self.connections()})
        await self._until_quiet(min(deadline, loop.time() + DELAYS_UNTIL_QUIET * self.settings.drain_delay))
        self.server_state.last_request_s = DELAYS_IDLE * self.settings.drain_delay
        self.server_state.draining = True
        self.stop_accepting()
        for connection in list(self.server_state.connections):
            connection.begin_drain()
        while self.server_state.connections and loop.time() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)
        await self.service.dispatcher.aborter.settle()

    async def _until_quiet(self, deadline: float) -> None:
        """Until load balancers know: no request has come for the drain delay. Each answer meanwhile ends its connection."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (left := min(max(began, self.service.asked_at) + self.settings.drain_delay, deadline) - loop.time()) > 0:
            await asyncio.sleep(left)

    async def close(self) -> None:
        await self.access.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        await self.encoders.close()
        await self.pool.close()


class RemoteEdge(Edge):
    """An edge whose brain is another process."""

    desk: RemoteDesk

    def __init__(self, settings: Settings, *, index: int, max_files: int) -> None:
        desk = RemoteDesk(settings, Counters(), index=index, answer=self._answer, connections=self.connections)
        super().__init__(settings, desk, Pool(), max_files=max_files)
        desk.on_ready = self._worker_ready
        self._quota = QuotaReports(self.access.callers, desk.tell_uses)
        desk.on_shares = self._quota.take
        self._own_link = LinkServer(lambda: Channel(lambda c, m: None, lambda c: None, self._answer))

    async def start(self, data: socket.socket, link_name: str, own_link: socket.socket) -> None:
        """Opens the data port once the brain has told its table: until then other edges serve.

        `own_link`: where the control process asks while there is no brain.
        """
        self._quota.start()
        self.desk.start(link_name)
        await self._own_link.start(own_link)
        await self.desk.until_here(TABLE_WAIT_S)
        await self.open(data)

    async def close(self) -> None:
        await super().close()
        self._quota.close()
        await self.desk.close()
        await self._own_link.close()

    async def _answer(self, ask: Ask) -> bytes:
        return await self.answers.answer(ask)

    def _worker_ready(self, view: WorkerView) -> None:
        self.encoders.want(view.record, view.host)


async def serve(handover: Handover) -> int:
    """The life of one of several edges."""
    stop = on_stop(handover)
    edge = RemoteEdge(handover.settings, index=handover.index, max_files=raise_file_limit())
    await edge.start(socket.socket(fileno=handover.listen_fd), handover.link_name, listen(edge_link_name(handover.link_name, handover.index)))
    Sweeper().start()
    log.info("edge serves", extra={"router_id": handover.settings.router_id, "edge": handover.index, "compiled": compiled.is_used()})
    await stop.wait()
    await edge.drain()
    await edge.close()
    return 0


def main(argv: list[str]) -> int:
    """Entry of the child process."""
    handover = read_handover(argv)
    die_with_parent(handover.parent_pid)
    set_up_logging("edge", handover.settings.log_level)
    if handover.settings.workers == 1:
        from fleet_router.single import serve as serve_single  # brings the brain, and numpy with it

        return uvloop.run(serve_single(handover))
    return uvloop.run(serve(handover))


if __name__ == "__main__":
    code = main(sys.argv)
    logging.shutdown()
    os._exit(code)  # nothing is left to do, and no library's thread may hold the end
