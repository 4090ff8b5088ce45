"""The parent process: binds the ports, starts its children, restarts what dies or hangs, ends everything on a signal. Loads no HTTP.

Children: with `--workers 1` an edge with its brain, else a brain and so many edges; and control. SIGTERM or SIGINT: the edges drain, then
control ends, then the brain; exit 0. A second signal ends everything at once.

The ports are held here, so a restarted child serves the same ones. A single edge inherits the listening socket: while it is restarted
connections wait. Several edges listen each on a socket of its own (SO_REUSEPORT, the kernel spreads connections), and what is held here is
bound but never listens: a dead edge's socket is gone with it, so no connection can be given to nobody.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from fleet_router.hang import LOOK_S, Watch, see, take_beats
from fleet_router.http.listening import BACKLOG
from fleet_router.link import listen
from fleet_router.process import SHOW_STACKS, Handover
from fleet_router.settings import Settings

log = logging.getLogger(__name__)

RESTART_PAUSE_S: Final = (0.0, 0.2, 0.5, 1.0, 2.0)  # by failures in a row
STEADY_S: Final = 10.0  # a child that lived so long starts its failures anew
STACKS_S: Final = 0.5  # for writing its stacks
CONTROL_STOP_S: Final = 5.0
BRAIN_STOP_S: Final = 5.0
EDGE: Final = "fleet_router.edge.edge"
BRAIN: Final = "fleet_router.brain.process"
CONTROL: Final = "fleet_router.control.control"


class CannotStart(Exception):
    """A port cannot be bound, or a file not written; the message says which and what to do."""


@dataclass(slots=True)
class Child:
    """One child process and its history."""

    name: str
    module: str
    index: int = 0  # of an edge
    process: subprocess.Popen[bytes] | None = None
    watch: Watch = field(default_factory=lambda: Watch(0.0))
    beat_fd: int = -1
    started_at: float = 0.0
    failures: int = 0
    due: float = 0.0  # monotonic time of its next start


class Supervisor:
    """See the module. `run` returns the exit code."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        n = settings.workers
        self._edges = [Child("edge" if n == 1 else f"edge {i}", EDGE, i) for i in range(n)]
        self._brains = [Child("brain", BRAIN)] if n > 1 else []
        self._controls = [Child("control", CONTROL)]
        self._children = [*self._brains, *self._edges, *self._controls]
        self._signals = 0
        self._peers: socket.socket | None = None
        self._link_name = f"radixfleet-router-{os.getpid()}-{secrets.token_hex(8)}"

    def run(self) -> int:
        """Blocks for the process's life."""
        s = self._settings
        self._data = bind(s.host, s.data_port, "--data-port") if s.workers == 1 else reserve(s.host, s.data_port, "--data-port")
        self._control = bind(s.control_host, s.control_port, "--control-port")
        if s.peer_port >= 0:
            self._peers = bind(s.control_host, s.peer_port, "--peer-port")
        self._link = listen(self._link_name)
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop
        for child in self._children:
            self._start(child)
        self._announce()
        while not self._signals:
            now = time.monotonic()
            for child in self._children:
                self._look_after(child, now)
            pauses = [c.due - now for c in self._children if c.process is None]
            select.select([wake_read], [], [], max(0.0, min([LOOK_S, *pauses])))
            drain_pipe(wake_read)
        return self._stop(wake_read)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _start(self, child: Child) -> None:
        """Each child gets the sockets that are its own."""
        listener: socket.socket | None = None
        if child.module == CONTROL:
            listener = self._control
        elif child.module == EDGE:
            listener = self._data if not self._brains else beside(self._data)
        child.beat_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        holds_link = child.module == BRAIN or (child.module == EDGE and not self._brains)
        handover = Handover(
            self._settings, os.getpid(), self._link_name, listener.fileno() if listener is not None else -1,
            self._link.fileno() if holds_link else -1, child.index, self._peers.fileno() if holds_link and self._peers is not None else -1,
            child.beat_fd,
        )  # fmt: skip
        child.process = subprocess.Popen(
            [sys.executable, "-m", child.module, msgspec.json.encode(handover).decode()],
            pass_fds=[fd for fd in (handover.listen_fd, handover.link_fd, handover.peer_fd, handover.beat_fd) if fd >= 0],
            start_new_session=True,  # a terminal's Ctrl-C reaches only the supervisor
            stdin=subprocess.DEVNULL,
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # nothing here multiplies matrices: its threads would only lie about
        )
        if listener is not None and listener not in (self._data, self._control):
            listener.close()
        child.started_at = time.monotonic()
        child.watch = Watch(child.started_at)
        log.info("%s process started", child.name, extra={"child_pid": child.process.pid})

    def _look_after(self, child: Child, now: float) -> None:
        """Notices a death, and starts the child again when its pause is over."""
        if child.process is not None:
            code = child.process.poll()
            if code is None:
                self._watch(child, now)
                return
            child.failures = 1 if now - child.started_at > STEADY_S else child.failures + 1
            child.due = now + RESTART_PAUSE_S[min(child.failures, len(RESTART_PAUSE_S)) - 1]
            log.error("%s process ended, it is restarted", child.name, extra={"child_pid": child.process.pid, "exit_code": code})
            child.process = None
            os.close(child.beat_fd)
        if now >= child.due:
            self._start(child)

    def _watch(self, child: Child, now: float) -> None:
        """Kills a child whose loop does not go round any more; it first writes where it is, when it still can."""
        limit_s, process, watch = self._settings.hang_timeout, child.process, child.watch
        assert process is not None
        if take_beats(child.beat_fd):
            watch.beaten(now)
        elif now - watch.looked_at >= LOOK_S / 2:
            sight = see(process.pid)
            watch.silent(now, sight)
            if limit_s and watch.hangs(limit_s):
                facts = {"child_pid": process.pid, "state": sight.state if sight is not None else "unknown"}
                log.error("%s process has not reacted for %.0f s (--hang-timeout), it is killed", child.name, watch.silent_s, extra=facts)
                if watch.has_beaten:  # before that the signal would end it
                    process.send_signal(SHOW_STACKS)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(STACKS_S)
                process.kill()

    def _announce(self) -> None:
        if not self._settings.announce:
            return
        path = Path(self._settings.announce)
        told = {"dataPort": self._data.getsockname()[1], "controlPort": self._control.getsockname()[1], "pid": os.getpid()}
        if self._peers is not None:
            told["peerPort"] = self._peers.getsockname()[1]
        text = json.dumps(told)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            partial.write_text(text)
            partial.replace(path)
        except OSError as e:
            self._kill()
            raise CannotStart(f"--announce {path} cannot be written: {e.strerror}") from e

    def _stop(self, wake_read: int) -> int:
        """Edges, control, brain: whoever still serves can ask the next one."""
        log.info("stopping: the edges drain")
        drain_s = self._settings.drain_delay + self._settings.drain_timeout + 10.0
        for children, limit_s in ((self._edges, drain_s), (self._controls, CONTROL_STOP_S), (self._brains, BRAIN_STOP_S)):
            running = [(c, c.process) for c in children if c.process is not None]
            for _, process in running:
                process.send_signal(signal.SIGTERM)
            until = time.monotonic() + limit_s
            while (left := [c for c, process in running if process.poll() is None]) and self._signals < 2 and time.monotonic() < until:
                for child in left:
                    self._watch(child, time.monotonic())
                select.select([wake_read], [], [], 0.5)
                drain_pipe(wake_read)
            if left:
                break
        code = 0 if self._signals < 2 else 1
        self._kill()
        return code

    def _kill(self) -> None:
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.kill()
        for child in self._children:
            if child.process is not None:
                child.process.wait()


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A listening TCP socket that children inherit. Raises CannotStart."""
    try:
        s = _bound(*_address(host, port))
        s.listen(BACKLOG)
    except OSError as e:
        raise _cannot_bind(host, port, flag, e) from e
    s.setblocking(False)
    return s


def reserve(host: str, port: int, flag: str) -> socket.socket:
    """A TCP socket that is bound and never listens; sockets `beside` it can. Raises CannotStart, also when another router has the port."""
    try:
        family, address = _address(host, port)
        with _bound(family, address) as alone:  # without SO_REUSEPORT: fails when anybody listens
            address = alone.getsockname()
        return _bound(family, address, shared=True)
    except OSError as e:
        raise _cannot_bind(host, port, flag, e) from e


def beside(reserved: socket.socket) -> socket.socket:
    """One more bound socket on the same port, for one process to listen on."""
    s = _bound(reserved.family, reserved.getsockname(), shared=True)
    s.setblocking(False)
    return s


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, address


def _bound(family: int, address: Any, *, shared: bool = False) -> socket.socket:
    s = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends small pieces at once only where it knows that
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(address)
    except OSError:
        s.close()
        raise
    return s


def _cannot_bind(host: str, port: int, flag: str, e: OSError) -> CannotStart:
    return CannotStart(f"{flag} {host}:{port} cannot be bound: {e.strerror or e}; give another port, or end what uses it")


def drain_pipe(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
