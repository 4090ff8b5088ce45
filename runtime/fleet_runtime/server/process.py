"""The http process. `python -m fleet_runtime.server.process RUN_DIR INCARNATION`; it inherits the two listening sockets.

It answers probes from its first moment, then loads the tokenizer, and is ready after one request has gone through all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Generator
from typing import Final

import uvicorn
import uvloop

from fleet_contract.access import TlsFiles, renew_tls
from fleet_contract.errors import ApiError
from fleet_contract.logs import facts, set_up_logging
from fleet_contract.wire import RoutedHeaders, encode_ids
from fleet_runtime import heartbeat as hb
from fleet_runtime import messages as m
from fleet_runtime.config import RuntimeConfig
from fleet_runtime.errors import EXIT_START_FAILED, StartError, leave_failure
from fleet_runtime.mailbox import Mailbox
from fleet_runtime.priority import yield_to_engine
from fleet_runtime.server.access import ApiKeys, check_tls_flags
from fleet_runtime.server.app import create_app
from fleet_runtime.server.guard import Guard, protocol_class
from fleet_runtime.server.state import HttpState, load_text_model
from fleet_runtime.server.traces import Traces

log = logging.getLogger(__name__)

_KEEP_ALIVE_S: Final = 75
_FLUSH_S: Final = 2.0
_BEAT_S: Final = 0.2
_WARM_TRY_S: Final = 20.0
_WARM_PAUSE_S: Final = 0.1


class _Server(uvicorn.Server):
    """Without signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpProcess:
    """Two servers, one mailbox, one state, one loop."""

    def __init__(self, config: RuntimeConfig, incarnation: str) -> None:
        flags = config.flags()
        guard = Guard(header_timeout_s=flags.body_timeout, write_timeout_s=flags.write_timeout)
        mailbox = Mailbox(config.run_dir, m.HTTP, incarnation)
        self.state = HttpState(config, flags, hb.Board.open(config.run_dir), mailbox, guard)
        self._row = self.state.board.row(m.HTTP)
        self._stop = asyncio.Event()
        self._introduced = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tls = check_tls_flags(flags)
        if flags.api_key_file:
            self.state.keys = ApiKeys(flags.api_key_file)
        if flags.otlp_endpoint:
            who = config.identity
            service = f"{who.namespace}/{who.service}" if who.service else ""
            self.state.traces = Traces(flags.otlp_endpoint, service=service, worker=who.pod_name or who.pod_uid)

    async def run(self) -> None:
        """Until SIGTERM. Raises StartError."""
        self._row.set(phase=hb.PHASE_STARTING)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        config = self.state.config
        servers = [
            self._serve(config.data_fd, internal=False),
            self._serve(config.internal_fd, internal=True),
        ]
        loop.add_reader(self.state.mailbox.fd, self._read_mail)
        self._background(self.state.guard.run())
        self._background(self._beat())
        serving = [asyncio.create_task(s.serve(sockets=[sock])) for s, sock in servers]
        started = time.monotonic()
        self.state.text = await asyncio.to_thread(load_text_model, config)
        log.info("tokenizer loaded", extra=facts(seconds=round(time.monotonic() - started, 3)))
        gc.collect()
        gc.freeze()  # what was loaded stays: full collections are due by what requests leave behind, not by a share of all that is here
        yield_to_engine()
        self.state.mailbox.send(m.SUPERVISOR, m.Ready(who=m.HTTP, pid=os.getpid()))
        self._background(self._become_ready())
        await self._stop.wait()
        for server, _ in servers:
            server.should_exit = True
        await asyncio.wait(serving, timeout=_FLUSH_S)
        await self._flush()
        if self.state.traces is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self.state.traces.close), _FLUSH_S)

    def _serve(self, fd: int, *, internal: bool) -> tuple[_Server, socket.socket]:
        config = uvicorn.Config(
            create_app(self.state, internal=internal),
            http=protocol_class(self.state.guard),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ssl_context_factory=(lambda _config, _default: self._new_tls_context()) if self._tls and not internal else None,
        )
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        return _Server(config), sock

    def _new_tls_context(self) -> ssl.SSLContext:
        files = TlsFiles(self.state.flags.tls_cert_file, self.state.flags.tls_key_file)
        self._background(renew_tls(files, log))
        return files.context

    def _background(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a part of the http process failed", exc_info=error)
            os._exit(1)  # the supervisor starts a new one

    def _read_mail(self) -> None:
        """The descriptor is edge-triggered: read until nothing is left."""
        while messages := self.state.mailbox.receive():
            for message in messages:
                self._on_message(message)
        self._row.set(inflight=len(self.state.manager))

    def _on_message(self, message: m.Message) -> None:
        if isinstance(message, m.Peers):
            self.state.info = message.scheduler_info
            self.state.last_death = ""
            self._introduced.set()
        elif isinstance(message, m.Drain):
            self._drain(message.deadline)
        elif isinstance(message, m.ControlReply):
            self.state.late_replies += not self.state.controls.on_reply(message)
        else:
            if isinstance(message, m.PeerDied):
                self.state.controls.on_death(message.cause)
                self.state.last_death = message.cause
                log.warning("a process died; its requests end", extra=facts(who=message.who, cause=message.cause, open=len(self.state.manager)))
            self.state.manager.on_message(message)

    def _drain(self, deadline: float) -> None:
        self.state.manager.draining = True
        self._row.set(inflight=len(self.state.manager), phase=hb.PHASE_DRAINING)
        asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), self.state.manager.end_by_deadline)

    async def _beat(self) -> None:
        """The row's numbers, also when no mail comes. Short: the supervisor waits for inflight 0."""
        while True:
            self._row.beat()
            self._row.set(inflight=len(self.state.manager))
            await asyncio.sleep(0.01 if self.state.manager.draining else _BEAT_S)

    async def _become_ready(self) -> None:
        """Ready means that a request went through all processes. A decode worker computes no prompt, so it has no such request."""
        await self._introduced.wait()
        if self.state.flags.role != "decode":
            await self._warm_up()
        if not self.state.manager.draining:
            self._row.set(phase=hb.PHASE_READY)

    async def _warm_up(self) -> None:
        """One token through scheduler and detokenizer, again if a process dies meanwhile. A refusal is an answer too: the way is open."""
        started = time.monotonic()
        while not await self._one_token():
            log.warning("no answer to the first request yet; trying again")
        log.info("warm", extra=facts(seconds=round(time.monotonic() - started, 3)))

    async def _one_token(self) -> bool:
        manager = self.state.manager
        try:
            request = manager.open(RoutedHeaders())
        except ApiError:  # a neighbour is being restarted, or the worker drains
            await asyncio.sleep(_WARM_PAUSE_S)
            return manager.draining
        try:
            manager.admit(request, [m.Admit(rid=request.rid, ids=encode_ids([0]), max_new=1, temperature=0.0)])
            until = time.monotonic() + _WARM_TRY_S
            while request.open and time.monotonic() < until:
                if any(isinstance(item, ApiError) for item in await manager.wait(request, until)):
                    return manager.draining
            return not request.open
        finally:
            manager.cancel(request, "the first request took too long")
            manager.release(request)

    async def _flush(self) -> None:
        """What is written leaves before the process ends."""
        deadline = time.monotonic() + _FLUSH_S
        while self.state.guard.unsent_bytes() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


async def _main(config: RuntimeConfig, incarnation: str) -> None:
    await HttpProcess(config, incarnation).run()


def main() -> None:
    """Child entry."""
    run_dir, incarnation = sys.argv[1:3]
    config = RuntimeConfig.read(run_dir)
    set_up_logging(m.HTTP, config.flags().log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_main(config, incarnation))
    except StartError as e:
        leave_failure(run_dir, m.HTTP, e)
        os._exit(EXIT_START_FAILED)
    os._exit(0)  # no waiting for idle keep-alive connections or pool threads


if __name__ == "__main__":
    main()
