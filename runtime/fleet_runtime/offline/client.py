"""HTTP from an `Engine` to its own server on loopback: one connection a request, which ends the request when it is closed."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fleet_contract.errors import CODE_ABORTED, INVALID_REQUEST, SERVER, ApiError


class Call:
    """One request of a caller, a batch included: the connections that carry it, so that another thread may end them."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._aborted = False
        self.over = False  # it has its answer or its error; set by who waits for it

    @property
    def aborted(self) -> bool:
        """`abort` was called."""
        return self._aborted

    def attach(self, sock: socket.socket) -> None:
        """A connection that is about to carry a part of it. Raises ApiError 499 when it is aborted already."""
        with self._lock:
            if self._aborted:
                raise aborted()
            self._sockets.append(sock)

    def detach(self, sock: socket.socket) -> None:
        """The connection's part is over."""
        with self._lock:
            if sock in self._sockets:
                self._sockets.remove(sock)

    def abort(self) -> None:
        """Closes its connections, which the server takes as their clients' leaving. Again: nothing."""
        with self._lock:
            self._aborted = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # it is closed by now
                    sock.shutdown(socket.SHUT_RDWR)


def aborted() -> ApiError:
    """How a request ends that `abort` ended."""
    return ApiError(499, "the request was aborted", type=INVALID_REQUEST, code=CODE_ABORTED)


class Client:
    """Threads may share it. `cause`: why the server is gone, or None while it lives."""

    def __init__(self, host: str, port: int, cause: Callable[[], str | None]) -> None:
        self._host, self._port = host, port
        self._cause = cause

    def post(self, path: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        """The JSON of a 200 answer. Raises ApiError."""
        with self._open(path, body, call) as response:
            answer: dict[str, Any] = json.loads(self._read(response, call))
        return answer

    def events(self, path: str, body: dict[str, Any], call: Call) -> Iterator[dict[str, Any]]:
        """The events of a stream, from its first token on: it has begun when this returns. Raises ApiError, also while it is read."""
        opened = contextlib.ExitStack()
        response = opened.enter_context(self._open(path, body, call))
        return self._lines(response, call, opened)

    def _lines(self, response: http.client.HTTPResponse, call: Call, opened: contextlib.ExitStack) -> Iterator[dict[str, Any]]:
        with opened:
            while True:
                try:
                    line = response.readline()
                except (OSError, http.client.HTTPException) as e:
                    raise self._broken(call, e) from e
                if not line:
                    raise self._broken(call, None)
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if not data:
                    continue
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise ApiError.from_body(500, data)
                yield event

    @contextlib.contextmanager
    def _open(self, path: str, body: dict[str, Any], call: Call) -> Iterator[http.client.HTTPResponse]:
        """The response to a POST whose status is 200. Raises ApiError."""
        connection = http.client.HTTPConnection(self._host, self._port)
        sock: socket.socket | None = None
        try:
            try:
                connection.connect()
                sock = connection.sock
                call.attach(sock)
                connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as e:
                raise self._broken(call, e) from e
            if response.status != 200:
                raise ApiError.from_body(response.status, self._read(response, call))
            yield response
        finally:
            if sock is not None:
                call.detach(sock)
            connection.close()

    def _read(self, response: http.client.HTTPResponse, call: Call) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as e:
            raise self._broken(call, e) from e

    def _broken(self, call: Call, error: Exception | None) -> ApiError:
        """What to say of a connection that ended before its answer."""
        if call.aborted:
            return aborted()
        cause = self._cause()
        if cause is not None:
            return ApiError(503, cause, type=SERVER, code="engine_ended")
        what = f": {error}" if error is not None else ""
        return ApiError(502, f"the connection to the engine ended before the answer was complete{what}", type=SERVER, code="connection_lost")
