"""The parent process: binds the ports, starts edge and control, restarts what dies, ends everything on a signal. Loads no HTTP.

It holds the listening sockets, so a restarted child serves the same ports. SIGTERM or SIGINT: the edge drains, then the control
process ends, exit 0. A second signal ends everything at once.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fleet_router.link import listen
from fleet_router.process import Handover
from fleet_router.settings import Settings

log = logging.getLogger(__name__)

RESTART_PAUSE_S: Final = (0.0, 0.2, 0.5, 1.0, 2.0)  # by failures in a row
STEADY_S: Final = 10.0  # a child that lived so long starts its failures anew
CONTROL_STOP_S: Final = 5.0


class CannotStart(Exception):
    """A port cannot be bound, or a file not written; the message says which and what to do."""


@dataclass(slots=True)
class Child:
    """One child process and its history."""

    name: str
    module: str
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    due: float = 0.0  # monotonic time of its next start


class Supervisor:
    """See the module. `run` returns the exit code."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._children = (Child("edge", "fleet_router.edge"), Child("control", "fleet_router.control"))
        self._signals = 0
        self._link_name = f"radixfleet-router-{os.getpid()}-{secrets.token_hex(8)}"

    def run(self) -> int:
        """Blocks for the process's life."""
        s = self._settings
        self._data = bind(s.host, s.data_port, "--data-port")
        self._control = bind(s.control_host, s.control_port, "--control-port")
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
            select.select([wake_read], [], [], max(0.0, min(pauses)) if pauses else 5.0)
            drain_pipe(wake_read)
        return self._stop(wake_read)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _start(self, child: Child) -> None:
        edge = child.name == "edge"
        handover = Handover(
            self._settings,
            os.getpid(),
            self._link_name,
            (self._data if edge else self._control).fileno(),
            self._link.fileno() if edge else -1,
        )
        fds = [fd for fd in (handover.listen_fd, handover.link_fd) if fd >= 0]
        child.process = subprocess.Popen(
            [sys.executable, "-m", child.module, msgspec.json.encode(handover).decode()],
            pass_fds=fds,
            start_new_session=True,  # a terminal's Ctrl-C reaches only the supervisor
            stdin=subprocess.DEVNULL,
        )
        child.started_at = time.monotonic()
        log.info("%s process started", child.name, extra={"child_pid": child.process.pid})

    def _look_after(self, child: Child, now: float) -> None:
        """Notices a death, and starts the child again when its pause is over."""
        if child.process is not None:
            code = child.process.poll()
            if code is None:
                return
            child.failures = 1 if now - child.started_at > STEADY_S else child.failures + 1
            child.due = now + RESTART_PAUSE_S[min(child.failures, len(RESTART_PAUSE_S)) - 1]
            log.error("%s process ended, it is restarted", child.name, extra={"child_pid": child.process.pid, "exit_code": code})
            child.process = None
        if now >= child.due:
            self._start(child)

    def _announce(self) -> None:
        if not self._settings.announce:
            return
        path = Path(self._settings.announce)
        text = json.dumps({"dataPort": self._data.getsockname()[1], "controlPort": self._control.getsockname()[1], "pid": os.getpid()})
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            partial.write_text(text)
            partial.replace(path)
        except OSError as e:
            self._kill()
            raise CannotStart(f"--announce {path} cannot be written: {e.strerror}") from e

    def _stop(self, wake_read: int) -> int:
        edge, control = self._children
        log.info("stopping: the edge drains")
        deadline = time.monotonic() + self._settings.drain_delay + self._settings.drain_timeout + 10.0
        for child, limit in ((edge, deadline), (control, None)):
            if child.process is None:
                continue
            child.process.send_signal(signal.SIGTERM)
            until = limit if limit is not None else time.monotonic() + CONTROL_STOP_S
            while child.process.poll() is None and self._signals < 2 and time.monotonic() < until:
                select.select([wake_read], [], [], 0.5)
                drain_pipe(wake_read)
            if child.process.poll() is None:
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
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        s = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends small pieces at once only where it knows that
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(address)
        s.listen(1024)
    except OSError as e:
        raise CannotStart(f"{flag} {host}:{port} cannot be bound: {e.strerror or e}; give another port, or end what uses it") from e
    s.setblocking(False)
    return s


def drain_pipe(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
