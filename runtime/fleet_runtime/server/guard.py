"""Limits of a connection that the HTTP server does not have: slow or huge headers, and clients that never read.

The protocol class counts what the kernel took of each connection; `Guard.run` ends those that stand still. A response that ends before
its request's body is there lingers, so that the client can read it before the connection is reset.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fleet_contract.errors import INVALID_REQUEST, TIMEOUT, ApiError
from fleet_runtime.server.request_id import mint_request_id

MAX_HEADER_BYTES: Final = 64 << 10
_LINGER_S: Final = 2.0
_CHECK_S: Final = 0.25


@dataclass(slots=True)
class Guard:
    """Watches all connections of the process. `ended` counts those that a limit ended, by limit."""

    header_timeout_s: float
    write_timeout_s: float
    connections: set[GuardedProtocol] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Runs until cancelled. When this process stood still, what has come meanwhile is read first: clients are not judged by that."""
        looked, stood_still = time.monotonic(), False
        while True:
            await asyncio.sleep(_CHECK_S)
            now = time.monotonic()
            stood_still = not stood_still and now - looked > 2 * _CHECK_S
            looked = now
            if not stood_still:
                self.check(now)

    def check(self, now: float) -> None:
        """Ends what stands still at `now` (seconds)."""
        for connection in list(self.connections):
            if connection.unread_s(now) > self.write_timeout_s:
                self.ended["write_timeout"] += 1
                connection.abort()
            elif connection.reading_headers_s(now) > self.header_timeout_s:
                self.ended["header_timeout"] += 1
                if not connection.has_begun:  # connected ahead of its first request: not worth an answer
                    connection.abort()
                    continue
                connection.refuse(ApiError(408, "the request's headers did not arrive in time", type=TIMEOUT, code="header_timeout"))

    def unsent_bytes(self) -> int:
        """What is written but not yet in the kernel, over all connections."""
        return sum(c.unsent_bytes() for c in self.connections)


class _Transport:
    """A transport that counts what is written, and whose close waits for a client that is still sending."""

    def __init__(self, transport: asyncio.Transport, protocol: GuardedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._lingers = False
        self.written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._lingers:  # refused while an answer was on its way: nobody is told both
            return
        self.written += len(data)
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        if self._lingers or self._transport.is_closing() or not self._protocol.is_receiving_body():
            self._transport.close()
            return
        self._lingers = True
        if self._transport.can_write_eof():  # TLS cannot close one direction alone
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Give `uvicorn.Config(http=…)` a subclass made by `protocol_class`."""

    guard: Guard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counting = _Transport(transport, self)
        self._header_bytes = 0  # of headers that are whole
        self._unparsed_bytes = 0  # that came since the request's first piece, while its headers are not whole
        self._too_large = False
        self._retelling = False  # a parser is told again what another has read
        self.has_begun = False  # a byte has come
        self._reading_since: float | None = time.monotonic()
        self._sent = 0
        self._sent_at = time.monotonic()
        self.guard.connections.add(self)
        super().connection_made(self._counting)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.connections.discard(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset the library leaves its timer, which holds all of a dead connection for its time

    def data_received(self, data: bytes) -> None:
        if self.parser is None:
            return
        self.has_begun = True
        self._unset_keepalive_if_required()
        begun = self._reading_since
        self._parse(data)
        if self._reading_since is not None and self._reading_since == begun:  # else the piece has the end of another request
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._too_large = True
                self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as e:
                self._go_on_without_upgrade()
                data = data[e.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _go_on_without_upgrade(self) -> None:
        """A client may ask for another protocol (curl for h2c) in a request with a body; a server that does not know it serves the request
        (RFC 9110, 7.8). The parser stops at the end of such headers and would take the body for another protocol: a new one, told of the same
        framing, reads on."""
        framing = [name + b": " + value for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self._retelling = True
        self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""]))
        self._retelling = False

    def on_message_begin(self) -> None:
        if self._retelling:
            return
        self._header_bytes = self._unparsed_bytes = 0
        self._too_large = False
        if self._reading_since is None:
            self._reading_since = time.monotonic()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._retelling:
            return
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._retelling:
            return
        self._count_header(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._retelling:
            return
        self._reading_since = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else its body is still to come
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed is answered in the one error shape."""
        if self._too_large:
            self.guard.ended["header_size"] += 1
            self.refuse(ApiError(431, f"the request's headers have more than {MAX_HEADER_BYTES} bytes", code="headers_too_large"))
        else:
            self.refuse(ApiError(400, "this is not a valid HTTP/1.1 request", type=INVALID_REQUEST, code="invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Answers outside of the application and closes. Not while an answer is under way: then it only closes."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            request_id = mint_request_id()
            body = error.body(request_id)
            head = (
                f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def is_receiving_body(self) -> bool:
        """The client has not yet sent all of its request."""
        return self._reading_since is not None or (self.cycle is not None and self.cycle.more_body)

    def abort(self) -> None:
        """Drops the connection and what is unsent."""
        self._counting._transport.abort()

    def unsent_bytes(self) -> int:
        """Bytes written that the kernel has not taken."""
        return int(self._counting.get_write_buffer_size())

    def unread_s(self, now: float) -> float:
        """Seconds since the kernel last took a byte, while there are some to take."""
        unsent = self.unsent_bytes()
        sent = self._counting.written - unsent
        if unsent == 0 or sent != self._sent:
            self._sent, self._sent_at = sent, now
        return now - self._sent_at

    def reading_headers_s(self, now: float) -> float:
        """Seconds since a request's first byte (or the connection's start) without the end of its headers."""
        return 0.0 if self._reading_since is None else now - self._reading_since

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            self._too_large = True
            raise ValueError("headers too large")  # ends the parser; answered by send_400_response


def protocol_class(guard: Guard) -> type[GuardedProtocol]:
    """A protocol class whose connections `guard` watches."""
    return type("_Protocol", (GuardedProtocol,), {"guard": guard})
