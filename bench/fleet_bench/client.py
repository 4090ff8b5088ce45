"""A small HTTP/1.1 client for load: kept-alive connections, one request at a time on each, the time of every piece of an answer.

Raw asyncio protocols and httptools, because the client shares its cores with the server it measures.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from fleet_bench.clock import Clock


class ConnectionLost(Exception):
    """The connection ended before the answer did. `answered`: part of the answer had come."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class CannotConnect(Exception):
    """No connection to the server; the message says why."""


class Sink(Protocol):
    """Takes one answer; called from the event loop in this order."""

    def on_head(self, status: int, at_s: float) -> None: ...
    def on_body(self, piece: bytes, at_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `base`: path in front of every request's path, without a slash at its end."""

    host: str
    port: int
    base: str = ""
    tls: bool = False

    @classmethod
    def from_url(cls, url: str) -> Endpoint:
        """`http://host[:port][/path]`, with or without `/v1` at the end. Raises ValueError with what is allowed."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url!r}: http://HOST[:PORT] or https://HOST[:PORT] is needed")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls)

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class _Connection(asyncio.Protocol):
    """One connection; `exchange` sends a request and returns when its answer is whole."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._answered = False
        self._keep = False
        self._framed = False  # the answer says where it ends, by length or chunks
        self.reused = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by isinstance

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(f"not HTTP: {e}")
            self.close()

    def on_headers_complete(self) -> None:
        self._answered = True
        if self._sink is not None:
            self._sink.on_head(self._parser.get_status_code(), self._now)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(body, self._now)

    def on_message_complete(self) -> None:
        self._keep = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        # A body without length and without chunks ends with its connection: the parser cannot see that end.
        if self._answered and exc is None and not self._framed:
            self.on_message_complete()
        else:
            self._fail(str(exc) if exc else "the server closed the connection")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionLost(message, answered=self._answered))

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Raises ConnectionLost. Cancelled: the connection is closed, since its answer would come to the next request."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._answered, self._keep, self._framed = sink, False, False, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._sink = self._done = None
        if not self._keep:
            self.close()
        self.reused = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


class Client:
    """Requests to one endpoint. Owns its connections until `close`."""

    def __init__(self, endpoint: Endpoint, *, headers: Mapping[str, str], clock: Clock, connect_timeout_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if endpoint.tls else None
        lines = [f"Host: {endpoint.authority}", "Accept: */*", "Accept-Encoding: identity", *(f"{k}: {v}" for k, v in headers.items())]
        self._fixed = "".join(line + "\r\n" for line in lines)

    async def exchange(self, method: str, path: str, body: bytes, sink: Sink, *, on_sent: Callable[[float], Any] | None = None) -> None:
        """Sends a request and feeds its answer to `sink`; returns when the answer is whole.

        A kept connection that the server has closed meanwhile is replaced once, as browsers do. Raises CannotConnect, ConnectionLost.
        """
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"{method} {self.endpoint.base}{path} HTTP/1.1\r\n{self._fixed}{kind}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while True:
            connection = await self._take()
            if on_sent is not None:
                on_sent(self._clock())
            stale = connection.reused
            try:
                await connection.exchange(request, sink)
            except ConnectionLost as e:
                if stale and not e.answered:
                    continue
                raise
            if connection.usable:
                self._idle.append(connection)
            return

    async def _take(self) -> _Connection:
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
        loop = asyncio.get_running_loop()
        where = (self.endpoint.host, self.endpoint.port)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, made = await loop.create_connection(lambda: _Connection(self._clock), *where, ssl=self._tls)
        except TimeoutError as e:
            raise CannotConnect(f"no connection to {self.endpoint.authority} within {self._connect_timeout_s:g} s") from e
        except OSError as e:
            raise CannotConnect(f"no connection to {self.endpoint.authority}: {e.strerror or e}") from e
        return made

    def close(self) -> None:
        """Ends the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


@dataclass(slots=True)
class Whole:
    """A sink that keeps a whole answer."""

    status: int = 0
    body: bytes = b""

    def on_head(self, status: int, at_s: float) -> None:
        self.status = status

    def on_body(self, piece: bytes, at_s: float) -> None:
        self.body += piece


async def fetch(client: Client, method: str, path: str, body: bytes = b"", *, timeout_s: float = 30.0) -> Whole:
    """One small request, answer kept. Raises CannotConnect, ConnectionLost, TimeoutError."""
    answer = Whole()
    async with asyncio.timeout(timeout_s):
        await client.exchange(method, path, body, answer)
    return answer


def header_lines(items: Sequence[str], api_key: str | None) -> dict[str, str]:
    """`--header 'Name: value'` options and the API key as headers. Raises ValueError."""
    out: dict[str, str] = {}
    for item in items:
        name, colon, value = item.partition(":")
        if not colon or not name.strip() or any(c in item for c in "\r\n"):
            raise ValueError(f"--header {item!r}: 'Name: value' is needed")
        out[name.strip()] = value.strip()
    if api_key is not None:
        out["Authorization"] = f"Bearer {api_key}"
    return out
