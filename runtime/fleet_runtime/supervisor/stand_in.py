"""Answers on the worker's ports while there is no http process: 503 with the cause, at once.

Started by the supervisor when http dies, ended when the next one is ready. Without it a request that comes meanwhile would lie in the
listen backlog for as long as the new process takes to start, which on a busy machine is longer than a client waits. It speaks just
enough HTTP/1.1 for that: it reads a head, answers, closes. A thread of its own, because the supervisor's loop sleeps on other things.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fleet_contract.errors import OVERLOADED, ApiError
from fleet_runtime.server.request_id import accept_request_id

MAX_CONNECTIONS: Final = 256  # more wait in the backlog
MAX_HEAD_BYTES: Final = 64 << 10
LIMIT_S: Final = 2.0  # for a head, and again for the client to take its answer
_TICK_S: Final = 0.5
_REQUEST_ID: Final = re.compile(rb"\r\nx-request-id:[ \t]*([^\r\n]*?)[ \t]*\r\n", re.IGNORECASE)


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    until: float  # CLOCK_MONOTONIC
    head: bytearray = field(default_factory=bytearray)
    answered: bool = False


class StandIn:
    """See the module. `listeners` are shared with the http process, which sets them non-blocking too; they stay open."""

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self._listeners = listeners
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, cause: str) -> None:
        """Answers from now on. While it runs already: nothing."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(cause,), name="stand-in", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Accepts no more; who has its answer may still read it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(LIMIT_S + 1)
            self._thread = None

    def _run(self, cause: str) -> None:
        connections: dict[int, _Connection] = {}
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in selector.select(_TICK_S if not connections else _TICK_S / 10):
                    if isinstance(key.fileobj, socket.socket) and key.fileobj in self._listeners:
                        self._accept(key.fileobj, selector, connections)
                    else:
                        self._read(connections[key.fd], cause)
                now = time.monotonic()
                for fd, connection in list(connections.items()):
                    if now >= connection.until:
                        selector.unregister(fd)
                        connection.socket.close()
                        del connections[fd]
        for connection in connections.values():
            if not connection.answered:
                self._answer(connection, cause)
            connection.socket.close()

    @staticmethod
    def _accept(listener: socket.socket, selector: selectors.BaseSelector, connections: dict[int, _Connection]) -> None:
        if len(connections) >= MAX_CONNECTIONS:
            time.sleep(_TICK_S / 50)
            return
        with contextlib.suppress(OSError):  # the new http process was faster, or the client is gone
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            connections[accepted.fileno()] = _Connection(accepted, time.monotonic() + LIMIT_S)
            selector.register(accepted, selectors.EVENT_READ)

    def _read(self, connection: _Connection, cause: str) -> None:
        """What comes behind the head is read and dropped: closing a socket with unread bytes would take the answer from the client."""
        try:
            data = connection.socket.recv(MAX_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            connection.until = 0.0
        if connection.answered:
            return
        connection.head += data
        if b"\r\n\r\n" in connection.head or len(connection.head) > MAX_HEAD_BYTES:
            self._answer(connection, cause)

    @staticmethod
    def _answer(connection: _Connection, cause: str) -> None:
        connection.answered = True
        connection.until = time.monotonic() + LIMIT_S
        with contextlib.suppress(OSError):  # the client is gone
            connection.socket.send(answer_to(bytes(connection.head), cause))
            connection.socket.shutdown(socket.SHUT_WR)


def answer_to(head: bytes, cause: str) -> bytes:
    """The whole response to a request's head. A worker that restarts its http process is alive, but takes no request."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) > 1 and words[1].partition(b"?")[0] == b"/livez":
        status, body, extra = "200 OK", b'{"status":"ok"}', ""
    else:
        given = _REQUEST_ID.search(head)
        request_id = accept_request_id(given[1].decode("latin-1") if given is not None else None)
        error = ApiError(503, f"{cause}; it is being restarted", type=OVERLOADED, code="worker_restarting")
        status, body = "503 Service Unavailable", error.body(request_id)
        extra = f"Retry-After: 1\r\nX-Request-Id: {request_id}\r\n"
    fields = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}Connection: close\r\n\r\n"
    return fields.encode("latin-1") + (b"" if words[0] == b"HEAD" else body)
