"""The supervisor: parent of scheduler, detokenizer and http. Starts, introduces, watches, restarts and stops them.

One loop, level-based: gather (mail, deaths, signals) -> decide -> act. It loads neither torch nor an HTTP library, so that it stays small
and cannot be what fails.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import zmq

from fleet_contract import names
from fleet_contract.cpus import read_text
from fleet_contract.logs import facts
from fleet_runtime import heartbeat as hb
from fleet_runtime import messages as m
from fleet_runtime.config import mint_incarnation
from fleet_runtime.errors import EXIT_START_FAILED, StartError
from fleet_runtime.record import worker_record
from fleet_runtime.supervisor.children import MODULES, Child, read_failure, spawn
from fleet_runtime.supervisor.facts import ENV_PODINFO_ANNOTATIONS, drain_seconds
from fleet_runtime.supervisor.policy import Backoff, SchedulerBudget, death_in_words
from fleet_runtime.supervisor.prepare import Prepared, write_atomically
from fleet_runtime.supervisor.stand_in import StandIn

log = logging.getLogger(__name__)

_IDLE_POLL_S: Final = 1.0
_DRAIN_POLL_S: Final = 0.02
_GOODBYE_S: Final = 3.0  # after the drain's deadline: http writes its last errors
_START_TRIES: Final = 3  # restarts of http or the detokenizer before the worker was ever ready
_STOP_S: Final = 3.0  # a child's time between SIGTERM and SIGKILL


class Signals:
    """SIGTERM and SIGINT counted, SIGCHLD noticed; `wake` becomes readable with each. Installed first thing, so that a pod can be
    terminated while it starts."""

    def __init__(self) -> None:
        self.stops = 0
        self.last_stop = 0
        self.wake, self._write = socket.socketpair()
        self.wake.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def drain_wakeups(self) -> None:
        """Empties `wake`."""
        try:
            while self.wake.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1
        self.last_stop = number


class Supervisor:
    """Runs one worker until it is told to stop or cannot go on."""

    def __init__(self, prepared: Prepared, signals: Signals, env: Mapping[str, str], modules: Mapping[str, str] = MODULES) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._flags = prepared.config.flags()
        self._signals = signals
        self._podinfo = env.get(ENV_PODINFO_ANNOTATIONS, names.PODINFO_ANNOTATIONS)
        self._modules = modules
        self._incarnation = mint_incarnation()
        self._children: dict[str, Child] = {}
        self._start_at: dict[str, float] = dict.fromkeys(m.CHILDREN, 0.0)  # of those that do not live
        self._introduced: tuple[str, ...] = ()  # incarnations in the last Peers
        self._budget = SchedulerBudget()
        self._backoffs = {m.HTTP: Backoff(), m.DETOKENIZER: Backoff()}
        # Where the data port speaks TLS, its callers wait in the backlog: the stand-in has no certificate.
        self._stand_in = StandIn(prepared.sockets[1:] if self._flags.tls_cert_file else prepared.sockets)
        self._started = time.monotonic()
        self._drain_deadline: float | None = None
        self._served = False  # all were ready once
        self._board = hb.Board.create(self._config.run_dir)
        self._row = self._board.row(m.SUPERVISOR)
        self._row.set(phase=hb.PHASE_STARTING)
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.LINGER, 0)
        self._pull.bind(m.endpoint(self._config.run_dir, m.SUPERVISOR))
        self._push: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(signals.wake, zmq.POLLIN)

    def run(self) -> int:
        """Returns the exit code. Raises StartError when the worker cannot start, or its scheduler died too often."""
        self._config.write()
        if self._flags.announce:
            Path(self._flags.announce).unlink(missing_ok=True)
        code = 1
        try:
            while True:
                self._start_due()
                self._wait()
                self._read_mail()
                self._reap()
                self._introduce()
                done = self._stop_asked()
                if done is not None:
                    code = done
                    return code
        finally:
            self._stop_children(forced=code != 0)
            self._pull.close(linger=0)
            for push in self._push.values():
                push.close(linger=0)
            self._context.term()

    def _start_due(self) -> None:
        now = time.monotonic()
        for who in m.CHILDREN:
            if who in self._children or now < self._start_at[who] or self._drain_deadline is not None:
                continue
            row = self._board.row(who)
            row.set(phase=hb.PHASE_STARTING, percent=0, pending=0, inflight=0)
            row.set_text("starting")
            child = spawn(who, self._config.run_dir, fds=self._prepared.fds if who == m.HTTP else (), modules=self._modules)
            self._children[who] = child
            log.info("process started", extra=facts(child=who, pid=child.process.pid, incarnation=child.incarnation))

    def _wait(self) -> None:
        """Until mail, a signal, or the next thing to do."""
        now = time.monotonic()
        due = [at - now for who, at in self._start_at.items() if who not in self._children]
        seconds = _DRAIN_POLL_S if self._drain_deadline is not None else max(0.0, min([_IDLE_POLL_S, *due]))
        if self._signals.stops and self._drain_deadline is None:
            seconds = 0.0
        self._poller.poll(int(seconds * 1000))
        self._signals.drain_wakeups()
        self._row.beat()

    def _read_mail(self) -> None:
        while True:
            try:
                message = m.decode(self._pull.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            child = self._children.get(message.who) if isinstance(message, m.Ready) else None
            if child is None or not isinstance(message, m.Ready) or message.sender != child.incarnation:
                continue
            child.ready = True
            child.info = message.scheduler_info
            if child.who == m.HTTP:
                self._stand_in.stop()
            log.info("process ready", extra=facts(child=child.who, seconds=round(time.monotonic() - child.started_at, 3)))

    def _reap(self) -> None:
        for who, child in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[who]
                self._on_death(child, code)

    def _on_death(self, child: Child, code: int) -> None:
        who, now = child.who, time.monotonic()
        failure = read_failure(self._config.run_dir, who) if code == EXIT_START_FAILED else None
        cause = f"{who} cannot start: {failure.message}" if failure else death_in_words(who, code)
        row = self._board.row(who)
        row.set(phase=hb.PHASE_DEAD, pending=0, inflight=0)
        row.set_text(cause)
        if who == m.HTTP:
            self._stand_in.start(cause)
        log.error("process died", extra=facts(child=who, pid=child.process.pid, cause=cause, lived_s=round(now - child.started_at, 3)))
        if child.incarnation in self._introduced:
            for other in self._children.values():
                self._send(other, m.PeerDied(who=who, incarnation=child.incarnation, cause=cause))
        if self._drain_deadline is not None:
            return
        if failure is not None and not self._served:
            raise StartError(failure.reason if failure.reason in names.START_FAILURES else "Internal", failure.message)
        if who == m.SCHEDULER:
            if not self._budget.take(now):
                raise StartError("OutOfMemory" if code == -signal.SIGKILL else "Internal", f"{cause}; it died too often, giving up")
            self._start_at[who] = now
        else:
            self._start_at[who] = now + self._backoffs[who].delay(now - child.started_at)
            if not self._served and self._backoffs[who].failures > _START_TRIES:
                raise StartError("Internal", f"{cause}, {self._backoffs[who].failures} times before it was ready; its log has the reason")

    def _introduce(self) -> None:
        """Tells everybody who lives, when all are ready and somebody is new. The http process, whose mail the others wait for, comes last."""
        if len(self._children) < len(m.CHILDREN) or not all(c.ready for c in self._children.values()):
            return
        incarnations = tuple(self._children[who].incarnation for who in m.CHILDREN)
        if incarnations == self._introduced:
            return
        info = self._children[m.SCHEDULER].info or m.SchedulerInfo()
        for who in m.CHILDREN:
            self._send(
                self._children[who],
                m.Peers(
                    http=self._children[m.HTTP].incarnation,
                    scheduler=self._children[m.SCHEDULER].incarnation,
                    detokenizer=self._children[m.DETOKENIZER].incarnation,
                    scheduler_info=info,
                ),
            )
        self._introduced = incarnations
        if self._drain_deadline is None:
            self._row.set(phase=hb.PHASE_READY)
        self._announce(info)
        if not self._served:
            ports = {"data_port": self._config.data_port, "internal_port": self._config.internal_port}
            seconds = round(time.monotonic() - self._started, 3)
            kv = facts(seconds=seconds, kv_tokens=info.kv_capacity_tokens, threads=self._config.threads, **ports)
            log.info("all processes are ready", extra=kv)
        self._served = True

    def _announce(self, info: m.SchedulerInfo) -> None:
        if not self._flags.announce:
            return
        record = worker_record(self._config, info, self._children[m.SCHEDULER].incarnation)
        try:
            write_atomically(Path(self._flags.announce), msgspec.json.encode(record))
        except OSError as e:
            raise StartError("CacheUnwritable", f"--announce {self._flags.announce}: {e}; name a file in a folder that exists") from e

    def _stop_asked(self) -> int | None:
        """Exit code when it is time to stop, None while the worker goes on."""
        if not self._signals.stops:
            return None
        if not self._served or not self._introduced:
            log.info("stopped while starting")
            return 0
        if self._signals.stops > 1:
            log.warning("second signal: stopping at once")
            return 128 + self._signals.last_stop
        if self._drain_deadline is None:
            self._begin_drain()
            return None
        if self._is_drained():
            log.info("drained")
            return 0
        if time.monotonic() > (self._drain_deadline or 0.0) + _GOODBYE_S:
            log.warning("the drain's time is over")
            return 0
        return None

    def _begin_drain(self) -> None:
        seconds = drain_seconds(read_text(self._podinfo), self._flags.drain_timeout, datetime.now(UTC))
        self._drain_deadline = time.monotonic() + seconds
        self._row.set(phase=hb.PHASE_DRAINING)
        log.info("draining", extra=facts(at_most_s=round(seconds, 3), open_requests=self._board.row(m.HTTP).inflight))
        for who in (m.HTTP, m.SCHEDULER):
            if who in self._children:
                self._send(self._children[who], m.Drain(deadline=self._drain_deadline))

    def _is_drained(self) -> bool:
        """Http has seen the drain (or is dead) and nothing is open any more."""
        http = self._board.row(m.HTTP)
        if m.HTTP in self._children and (http.phase != hb.PHASE_DRAINING or http.inflight > 0):
            return False
        return m.SCHEDULER not in self._children or self._board.row(m.SCHEDULER).pending == 0

    def _send(self, child: Child, message: m.Message) -> None:
        message.sender = self._incarnation
        message.to = child.incarnation
        if child.who not in self._push:
            push = self._context.socket(zmq.PUSH)
            push.setsockopt(zmq.RECONNECT_IVL, 20)
            push.connect(m.endpoint(self._config.run_dir, child.who))
            self._push[child.who] = push
        try:
            self._push[child.who].send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.error("a child takes no mail", extra=facts(child=child.who))

    def _stop_children(self, *, forced: bool) -> None:
        """Http first: it still writes what was answered."""
        self._stand_in.stop()
        for group in ((m.HTTP,), (m.DETOKENIZER, m.SCHEDULER)):
            living = [self._children[who] for who in group if who in self._children]
            for child in living:
                child.signal(signal.SIGKILL if forced else signal.SIGTERM)
            deadline = time.monotonic() + _STOP_S
            for child in living:
                while not child.wait(0.05) and time.monotonic() < deadline and self._signals.stops < 2:
                    pass
                child.signal(signal.SIGKILL)
                child.wait(_STOP_S)
        log.info("all processes ended", extra=facts(pid=os.getpid()))
