"""The bootstrap server of a prefill worker, and the question a decode worker asks it. HTTP/1.1 over asyncio, nothing else.

`GET /route` answers a `handoff.Route` as JSON, 503 until the worker is registered; `GET /health` answers 200. Both on the I/O thread.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from fleet_contract.handoff import Route

MAX_HEAD_BYTES: Final = 8192
REQUEST_TIMEOUT_S: Final = 5.0
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class RouteError(Exception):
    """A prefill worker could not be asked; the message says what happened."""


class NotRegistered(RouteError):
    """It answers 503: ask again in a moment."""


def split_address(address: str) -> tuple[str, int]:
    """`host:port` with an IPv6 host bare or in brackets. Raises RouteError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise RouteError(f"{address!r} is no bootstrap address; host:port is allowed")
    return host, int(port)


class BootstrapServer:
    """Serves one route; `route` is None until the worker is registered."""

    def __init__(self) -> None:
        self.route: Route | None = None
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Binds; raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_TIMEOUT_S)
            status, body = self._answer(head)
            writer.write(
                f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await asyncio.wait_for(writer.drain(), REQUEST_TIMEOUT_S)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            pass  # half a request, or a client that left: nobody to answer
        finally:
            writer.close()

    def _answer(self, head: bytes) -> tuple[int, bytes]:
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) != 3:
            return 400, b'{"error":"not an HTTP request line"}'
        if words[0] != b"GET":
            return 405, b'{"error":"only GET is served here"}'
        path = words[1].split(b"?", 1)[0]
        if path == b"/health":
            return 200, b'{"status":"ok"}'
        if path != b"/route":
            return 404, b'{"error":"GET /route and GET /health are served here"}'
        if self.route is None:
            return 503, b'{"error":"this worker is not registered yet; ask again"}'
        return 200, msgspec.json.encode(self.route)

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()


async def fetch_route(host: str, port: int, *, timeout_s: float) -> Route:
    """Asks a bootstrap server for its route. Raises RouteError."""
    try:
        async with asyncio.timeout(timeout_s):
            head, body = await _get_route(host, port)
    except TimeoutError as e:
        raise RouteError(f"its bootstrap server {host}:{port} did not answer within {timeout_s:g} s") from e
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as e:
        raise RouteError(f"its bootstrap server {host}:{port} cannot be reached: {e}") from e
    status = head.split(b" ", 2)[1:2]
    if status == [b"503"]:
        raise NotRegistered(f"its bootstrap server {host}:{port} says that it is not registered yet")
    if status != [b"200"]:
        line = head.split(b"\r", 1)[0][:80].decode("utf-8", "replace")
        raise RouteError(f"its bootstrap server {host}:{port} answered {line!r}")
    try:
        return msgspec.json.decode(body, type=Route)
    except msgspec.DecodeError as e:
        raise RouteError(f"its bootstrap server {host}:{port} sent no route: {e}") from e


async def _get_route(host: str, port: int) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(f"GET /route HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return head, await reader.read(MAX_HEAD_BYTES)
    finally:
        writer.close()
