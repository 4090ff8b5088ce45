"""HTTP/1.1 towards clients: one protocol object per connection, raw on the event loop, with every limit of the data port.

httptools parses (and refuses ambiguous lengths); a head of the very bytes that it has read and passed before is not parsed again.
Requests of one connection are answered in order, one at a time. The handler gets a `Request` and an `Exchange` to answer on. Limits:
head and body size, time for head and body, time a client may leave an answer unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools

from fleet_contract import errors as contract_errors
from fleet_contract.errors import ApiError
from fleet_router.http.exchange import Exchange, HeaderLines
from fleet_router.http.head import INVALID, Head, answer_begin, body_too_large, error_lines, know_head, path_of, too_many_connections, without_upgrade
from fleet_router.http.held import HeldBodies
from fleet_router.http.outbox import Outbox
from fleet_router.http.request import Limits, Request

log = logging.getLogger(__name__)

HIGH_WATER: Final = 16 << 10  # bytes that a client leaves unread before its worker is not read from either
LOW_WATER: Final = 4 << 10
SMALL_PIECE: Final = 2 << 10
UNPAUSE_S: Final = 0.002
MAX_PIPELINED: Final = 16
MAX_WAITING_BYTES: Final = 1 << 20  # of pipelined bodies; more are read when their turn comes near
REFUSED_AT_ONCE: Final = 32  # connections over the limit that are told why; more are closed unheard
MAX_BETWEEN_CHUNKS: Final = 64 << 10  # bytes of a body's framing beyond what its chunks need
CHUNK_FRAMING: Final = 16  # bytes that a chunk's size and line ends may take
LINGER_S: Final = 2.0  # how long we read what a refused client still sends, so that it can read our answer


Handler = Callable[[Request, "Exchange"], None]  # answers now or later, raises nothing


@dataclass(eq=False)
class ServerState:
    """What all connections share."""

    limits: Limits
    handler: Handler
    make_request_id: Callable[[bytes | None], str]
    on_limit: Callable[[str], None]
    write_error: Callable[[str, ApiError, str], bytes] = lambda path, error, request_id: error.body(request_id)
    more_head: Callable[[Request], bytes] = lambda request: b""  # header lines of every answer
    connections: set[DataProtocol] = field(default_factory=set)
    draining: bool = False
    last_request_s: float = 0.0  # while draining: how long an idle connection may still bring a request
    heads: dict[bytes, Head] = field(default_factory=dict)  # by their bytes, up to the empty line
    outbox: Outbox = field(default_factory=lambda: Outbox(asyncio.get_running_loop()))
    bodies: HeldBodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = HeldBodies(self.limits.max_held_bytes, self.on_limit)


class HttpExchange(Exchange):
    """On a connection: chunked, or until the connection ends for HTTP/1.0."""

    def __init__(self, protocol: DataProtocol, request: Request) -> None:
        super().__init__(request)
        self._protocol = protocol
        self._chunked = False

    @property
    def gone(self) -> bool:
        return self._protocol.transport is None

    @property
    def paused(self) -> bool:
        return self._protocol.write_paused

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: HeaderLines = ()) -> None:
        if self.ended:
            return
        assert not self.started
        self.started = self.ended = True
        self.status = status
        head = self._head(status, content_type, extra, b"Content-Length: %d\r\n" % len(body))
        self._protocol.write(head if self.request.method == "HEAD" else head + body)
        self._protocol.answer_done(self)

    def fail(self, error: ApiError) -> None:
        body = self._protocol.state.write_error(self.request.path, error, self.request.request_id)
        self.respond(error.status, body, extra=error_lines(error))

    def start_stream(self, content_type: bytes) -> None:
        assert not self.started
        self.started = True
        self.status = 200
        self._protocol.state.bodies.let_go(self.request)
        self._chunked = self.request.head.version != "1.0"
        if not self._chunked:
            self.request.keep_alive = False
        framing = b"Transfer-Encoding: chunked\r\n" if self._chunked else b""
        self._protocol.write(self._head(200, content_type, ((b"Cache-Control", b"no-cache"),), framing))

    def write(self, data: bytes) -> None:
        if self._chunked:
            self._protocol.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._protocol.write(data)

    def finish(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._chunked:
            self._protocol.write(b"0\r\n\r\n")
        self._protocol.answer_done(self)

    def cut(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.request.keep_alive = False
        self._protocol.answer_done(self)

    def _head(self, status: int, content_type: bytes, extra: HeaderLines, framing: bytes) -> bytes:
        request = self.request
        keep = request.keep_alive = request.keep_alive and not self._protocol.state.draining
        begin = answer_begin(status, content_type)
        end = b"\r\n" if keep and request.head.version == "1.1" else b"Connection: keep-alive\r\n\r\n" if keep else b"Connection: close\r\n\r\n"
        if extra:
            end = b"".join([b"%b: %b\r\n" % pair for pair in extra]) + end
        more = self._protocol.state.more_head(request)
        return b"".join([begin, request.request_id.encode(), b"\r\n", framing, more, self.head_lines, end])


class DataProtocol(asyncio.Protocol):
    """One client connection."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.write_paused = False
        self.exchange: HttpExchange | None = None
        self._waiting: deque[Request] = deque()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0  # loop time of `_timer`
        self._due = 0.0  # loop time at which `_then` is called
        self._then: Callable[[], None] | None = None
        self._raw_head = b""  # of the message that is parsed now, when it came whole
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent: list[bytes] = []  # small pieces of this turn of the loop
        self._written = 0
        self._flushed = 0
        self._closed_for_reading = False
        self._linger = False  # the client may still be sending what we refused
        self._is_too_many = False  # came when all connections were taken: its request is refused
        self._in_message = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._head_done = False
        self._upgrade_offered = False
        self._body: bytes | bytearray = b""  # one piece as it came, more of them joined
        self._body_bytes = 0
        self._raw_bytes = 0  # of the present message's body with its framing, as far as they came alone
        self._chunks = 0
        self._waiting_bytes = 0
        self._owes_continue = False  # the client waits for our word before it sends its body
        self._request: Request | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(HIGH_WATER, LOW_WATER)
        self.state.connections.add(self)
        over = len(self.state.connections) - self.state.limits.max_connections
        self._is_too_many = over > 0
        if over > REFUSED_AT_ONCE:
            self.state.on_limit("connections")
            self.transport.abort()
            return
        self._arm(self.state.limits.head_timeout_s, self._head_late)

    def data_received(self, data: bytes) -> None:
        if self._closed_for_reading:
            self._linger = True
            return
        if not self._in_message and self.exchange is None and not self._waiting:
            raw = data[: data.find(b"\r\n\r\n") + 4]
            head = self.state.heads.get(raw)
            if head is not None and len(data) == len(raw) + head.length and not self._is_too_many:
                self._then = None
                request = Request(head, head.keep_alive, self.state.make_request_id(head.header(b"x-request-id")), data[len(raw) :])
                self.state.bodies.add(head.length)
                self.state.bodies.hold(self, request)
                self._start(request)
                return
            self._raw_head = raw
        else:
            self._raw_head = b""
        in_body = self._request if self._in_message and self._head_done else None
        try:
            self._feed(data)
        except httptools.HttpParserError as e:
            cause = e.__context__
            if isinstance(cause, ApiError):
                self._refuse(cause)
            elif not self._closed_for_reading and self._last_keeps_alive():
                self._refuse(ApiError(400, f"this is no valid HTTP/1.1 request: {e}", code=INVALID))
            self._closed_for_reading = self._linger = True
        if in_body is not None and in_body is self._request and self._in_message:
            self._check_framing(len(data))
        if self._body_bytes and self._in_message:
            self.state.bodies.in_the_middle(self)
        self._next()

    def _feed(self, data: bytes) -> None:
        """Parses; a request that offers another protocol is read again without its offer."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as e:
                rest, head = rest[e.args[0] :], self._without_upgrade()
                self._parser.feed_data(head)

    def eof_received(self) -> bool | None:
        self.flush()  # what has its answer gets it
        return None  # a client that ends its side is gone: nothing of ours would reach a closed socket

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._disarm()
        self._cancel_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._parser = None  # it has methods of ours: the circle would wait for a look at everything
        self.state.connections.discard(self)
        exchange, self.exchange = self.exchange, None
        self._give_up_body()
        for request in (*self._waiting, *([exchange.request] if exchange is not None else ())):
            self.state.bodies.let_go(request)
        self._waiting.clear()
        if exchange is not None and not exchange.ended:
            exchange.ended = True
            if exchange.on_gone is not None:
                exchange.on_gone()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self.exchange is not None and self.exchange.on_pause is not None:
            self.exchange.on_pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.exchange is not None and self.exchange.on_resume is not None:
            self.exchange.on_resume()

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        self._begin()
        self._in_message = True
        if self._then is None or self.exchange is None:
            self._arm(self.state.limits.head_timeout_s, self._head_late)

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        self._url += url
        self._check_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        self._check_head()
        if not self._head_done:  # trailers mean nothing to us
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            self._upgrade_offered = True  # no error: clients offer h2c or websockets to everybody
            return
        self._head_done = True
        parser = self._parser
        method, version = parser.get_method().decode(), parser.get_http_version()
        head = Head(method, path_of(self._url), self._headers, version, bool(parser.should_keep_alive()))
        self._request = Request(head, head.keep_alive, self.state.make_request_id(head.header(b"x-request-id")))
        if self._is_too_many:
            self.state.on_limit("connections")  # it hears so before this process runs out of files, when it could tell nobody any more
            raise too_many_connections(self.state.limits.max_connections)
        head.vet(self.state.limits.max_body_bytes)
        if head.expects_continue:
            self._owes_continue = True
            self._go_on()
        elif self._raw_head and not parser.should_upgrade() and head.header(b"transfer-encoding") is None:
            know_head(self.state.heads, self._raw_head, head)
        self._raw_head = b""
        self._arm(self.state.limits.body_timeout_s, self._body_late)

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        self.state.bodies.add(len(data))
        if self._body_bytes > self.state.limits.max_body_bytes:
            raise body_too_large(None, self.state.limits.max_body_bytes)
        if not self._body:
            self._body = data
        elif isinstance(self._body, bytes):
            self._body = bytearray(self._body) + data
        else:
            self._body += data

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_message_complete(self) -> None:
        if self._upgrade_offered:
            return
        self._in_message = False
        self._disarm()
        request = self._request
        assert request is not None
        request.body = bytes(self._body)
        self._body, self._body_bytes = b"", 0
        self.state.bodies.hold(self, request)
        self._owes_continue = False
        self._waiting.append(request)
        self._waiting_bytes += request.held_bytes
        if self._is_full:
            self.stop_reading()

    # -- used by HeldBodies and Exchange

    def stop_reading(self) -> None:
        if self.transport is not None:
            with contextlib.suppress(RuntimeError):
                self.transport.pause_reading()

    def read_on(self) -> None:
        """There is room: the time for its body begins anew."""
        if self._in_message and not self._closed_for_reading:
            self._arm(self.state.limits.body_timeout_s, self._body_late)
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self.transport is not None and not self._is_full and not self.state.bodies.is_stopped(self):
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Bytes to the client, with all that leaves in this turn of the loop; with more than SMALL_PIECE at once."""
        self._unsent.append(data)
        if len(data) > SMALL_PIECE:
            self.flush()
        elif len(self._unsent) == 1:
            self.state.outbox.add(self.flush)

    def flush(self) -> None:
        """Writes what was kept back, and starts the watch on a client that does not read. Again is nothing."""
        pieces, self._unsent = self._unsent, []
        if not pieces or self.transport is None or self.transport.is_closing():
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._written += len(data)
        self.transport.write(data)
        if len(data) > SMALL_PIECE and not self.write_paused and self.transport.get_write_buffer_size() > HIGH_WATER:
            self.pause_writing()  # the transport looks at the end of this turn: a worker would be read from in a loop until then
            self.loop.call_later(UNPAUSE_S, self._unpause)
        if self._write_timer is None:
            self._flushed = self._written - self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self.state.limits.write_timeout_s, self._check_write)

    def _unpause(self) -> None:
        """When the transport, which has looked meanwhile, sees nothing to wait for it tells nothing."""
        if self.write_paused and self.transport is not None and self.transport.get_write_buffer_size() <= HIGH_WATER:
            self.resume_writing()

    def answer_done(self, exchange: HttpExchange) -> None:
        """The exchange is complete: next request, or the end of the connection."""
        if self.exchange is exchange:
            self.exchange = None
        self.state.bodies.let_go(exchange.request)
        if self.transport is None:
            return
        if not exchange.request.keep_alive:
            self._closed_for_reading = self._linger = True
            self._close()
        elif self._waiting or self._in_message or self._closed_for_reading or self.state.draining:
            self.loop.call_soon(self._next)
        else:
            self._arm(self.state.limits.idle_timeout_s, self._idle_late)

    def begin_drain(self) -> None:
        """At most one further request on this connection."""
        if self.exchange is None and not self._waiting and not self._in_message:
            self._await_last()

    # -- inside

    def _give_up_body(self) -> None:
        """What came of the present message's body is not held any more."""
        count, self._body, self._body_bytes = self._body_bytes, b"", 0
        self.state.bodies.leave(self)
        self.state.bodies.free(count)

    def _begin(self) -> None:
        self._url = b""
        self._headers = []
        self._head_bytes = self._body_bytes = self._raw_bytes = self._chunks = 0
        self._head_done = self._owes_continue = False
        self._body = b""
        self._request = None

    @property
    def _is_full(self) -> bool:
        """No more is read until some of what waits had its turn."""
        return len(self._waiting) >= MAX_PIPELINED or self._waiting_bytes > MAX_WAITING_BYTES

    def _go_on(self) -> None:
        """The interim answer to a client that asked for it, when it is this request's turn."""
        if self._owes_continue and self.exchange is None and not self._waiting and self.transport is not None:
            self._owes_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _check_framing(self, count: int) -> None:
        """A body in chunks may not be mostly what stands between them."""
        self._raw_bytes += count
        if self._raw_bytes - self._body_bytes - CHUNK_FRAMING * self._chunks > MAX_BETWEEN_CHUNKS:
            text = f"there are more than {MAX_BETWEEN_CHUNKS} bytes between the body's chunks; send larger chunks, without extensions"
            self._refuse(ApiError(400, text, code=INVALID))

    def _without_upgrade(self) -> bytes:
        """The head that was read, without its offer to speak another protocol, for a new parser: RFC 9110 lets a server ignore an offer, but
        the parser would take the body for the other protocol."""
        parser, self._parser, self._upgrade_offered = self._parser, httptools.HttpRequestParser(self), False
        return without_upgrade(b"%b %b HTTP/%b" % (parser.get_method(), self._url, parser.get_http_version().encode()), self._headers)

    def _next(self) -> None:
        if self.exchange is not None or self.transport is None or self.transport.is_closing():
            return
        if not self._waiting:
            if self._closed_for_reading:
                self._close()
            elif self._in_message:
                self._go_on()
            elif self._then is not None:  # bytes that are no request yet stretch no limit
                pass
            elif self.state.draining:
                self._await_last()
            else:
                self._arm(self.state.limits.idle_timeout_s, self._idle_late)
            return
        if not self._in_message:
            self._disarm()
        request = self._waiting.popleft()
        self._waiting_bytes -= request.held_bytes
        self._resume_reading()
        self._start(request)

    def _await_last(self) -> None:
        """Nobody told this client that its connection ends: what it sends just now would be lost. The answer to it tells."""
        if self.state.last_request_s:
            self._arm(self.state.last_request_s, self._close)
        else:
            self._close()

    def _start(self, request: Request) -> None:
        exchange = self.exchange = HttpExchange(self, request)
        if request.refused is not None:
            exchange.fail(request.refused)
            return
        self.state.handler(request, exchange)

    def _last_keeps_alive(self) -> bool:
        """False when the last whole request said it is the last: what follows it is no request."""
        if self._in_message:
            return True
        last = self._waiting[-1] if self._waiting else self.exchange.request if self.exchange is not None else None
        return last is None or last.keep_alive

    def _refuse(self, error: ApiError) -> None:
        """Ends reading; the error is answered in its turn."""
        self._closed_for_reading = self._linger = True
        self._in_message = False
        self._disarm()
        self._give_up_body()
        request = self._request
        if request is None or (self._waiting and self._waiting[-1] is request):
            request = Request(Head("GET", "", [], "1.1", False), False, self.state.make_request_id(None))
        request.refused, request.keep_alive = error, False
        self._waiting.append(request)
        self._next()

    def _check_head(self) -> None:
        limit = self.state.limits.max_head_bytes
        if self._head_bytes > limit:
            raise ApiError(431, f"the request's head is longer than {limit} bytes", code="head_too_large")

    def _arm(self, seconds: float, then: Callable[[], None]) -> None:
        """One limit at a time. The timer is not moved with every request: it looks when it fires what is due."""
        due = self._due = self.loop.time() + seconds
        self._then = then
        if self._timer is None or due < self._fires_at:
            self._cancel_timer()
            self._fires_at = due
            self._timer = self.loop.call_later(seconds, self._on_timer)

    def _disarm(self) -> None:
        self._then = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        then, left = self._then, self._due - self.loop.time()
        if then is None:
            return
        if left > 0.001:
            self._fires_at = self._due
            self._timer = self.loop.call_later(left, self._on_timer)
            return
        self._then = None
        then()

    def _idle_late(self) -> None:
        self.state.on_limit("idle_timeout")
        self._close()

    def _head_late(self) -> None:
        if self._in_message or self._head_bytes:
            self._late("head", self.state.limits.head_timeout_s, "--head-timeout")
        else:
            self._idle_late()

    def _body_late(self) -> None:
        if self.state.bodies.is_stopped(self):
            self._refuse(self.state.bodies.no_room())
            return
        self._late("body", self.state.limits.body_timeout_s, "--body-timeout")

    def _late(self, part: str, seconds: float, flag: str) -> None:
        self.state.on_limit(f"{part}_timeout")
        text = f"the request's {part} did not arrive within {seconds:g} s ({flag} of the router)"
        self._refuse(ApiError(408, text, type=contract_errors.TIMEOUT, code="request_timeout"))

    def _check_write(self) -> None:
        self._write_timer = None
        transport = self.transport
        if transport is None:
            return
        unread = transport.get_write_buffer_size()
        if not unread:
            return
        flushed = self._written - unread
        if flushed <= self._flushed:
            self.state.on_limit("write_timeout")
            transport.abort()
            return
        self._flushed = flushed
        self._write_timer = self.loop.call_later(self.state.limits.write_timeout_s, self._check_write)

    def _close(self) -> None:
        """Ends the connection after what is written. A client that may still be sending is read from for a while: bytes that meet a closed
        socket would reset it, and the client would lose our answer."""
        self.flush()
        self._disarm()
        self._cancel_timer()
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._linger:
            with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
                transport.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self._end_linger)
        else:
            transport.close()

    def _end_linger(self) -> None:
        """The time of a client that does not close its side counts from our last byte; until then the limit of writing does."""
        self._timer = None
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size():
            self._timer = self.loop.call_later(LINGER_S, self._end_linger)
        else:
            self.transport.abort()
