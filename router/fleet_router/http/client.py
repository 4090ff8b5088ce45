"""HTTP/1.1 towards workers: connections kept alive per address, each carrying one request at a time for a `Sink`.

Raw protocol on the event loop; httptools finds where an answer ends, its bytes go on unchanged. A short answer whose head has the very
bytes of one that was read before is not parsed again, nor is a chunk that came alone and whole (`chunk`). Called by relay (streams) and by
`fetch` (small questions). A kept connection that turns out to be dead is replaced once, silently, when no answer byte came.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import httptools

from fleet_contract.errors import ApiError
from fleet_router import errors
from fleet_router.alarms import Alarms
from fleet_router.http.chunk import whole_chunk
from fleet_router.http.outbox import Outbox

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
IDLE_LIFE_S = 4.0  # below uvicorn's keep-alive of 5 s
STALE_S = 0.5  # a kept connection that ends so soon after a request was dead before it; later, the worker had taken it
MAX_IDLE = 64
MAX_HEAD_BYTES = 64 << 10
RECEIVE_BYTES = 16 << 10  # the kernel takes twice that; several 10 MB/s at a millisecond's distance
MAX_HEADS = 256  # heads of answers that are known
MAX_KNOWN_HEAD = 1 << 10  # bytes of each


class Sink(ABC):
    """What a request's answer flows into. After `on_end` or `on_lost` nothing more comes. A base, since compiled code calls that directly."""

    @abstractmethod
    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Status and header lines."""

    @abstractmethod
    def on_body(self, data: bytes) -> None:
        """A piece of the body."""

    @abstractmethod
    def on_end(self) -> None:
        """The answer is whole."""

    @abstractmethod
    def on_lost(self, error: ApiError) -> None:
        """It will never be."""


@dataclass(frozen=True, slots=True)
class KnownHead:
    """What the head of a whole answer says that leaves the connection open."""

    status: int
    headers: list[tuple[bytes, bytes]]
    length: int


class Connection(asyncio.Protocol):
    """One connection to a worker."""

    def __init__(self, pool: Pool, address: tuple[str, int]) -> None:
        self.pool = pool
        self.address = address
        self.loop = pool.loop
        self.transport: asyncio.Transport | None = None
        self.sink: Sink | None = None
        self.idle_since = 0.0
        self._sent_at = 0.0
        self.reused = False
        self.answered = False  # a byte of the present answer came
        self._parser: Any = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._status = 0
        self._retry: tuple[bytes, ...] | None = None
        self._raw_head = b""
        self._paused = False
        self._pieces: list[bytes] = []  # of the body, read in this turn
        self._unsent: Sequence[bytes] = ()  # of the request, in this turn of the loop
        self._between = False  # the parser stands before a chunk, and no byte of it came

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.sink is None:  # bytes nobody asked for
            self.close()
            return
        if not self.answered:
            self.answered, self._retry = True, None
            raw = data[: data.find(b"\r\n\r\n") + 4]
            known = self.pool.heads.get(raw)
            if known is not None and len(data) == len(raw) + known.length:
                self._whole(known, data[len(raw) :])
                return
            self._raw_head = raw
            self._parser = httptools.HttpResponseParser(self)
        elif self._between and (piece := whole_chunk(data)) is not None:  # a token of a stream, nearly always
            self.sink.on_body(piece)
            return
        self._between = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            self._pass_body()
            self._lose(f"it broke HTTP: {e}")
        else:
            if not data.endswith(b"\r\n"):
                self._between = False  # the next chunk has begun
            self._pass_body()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = self._parser = None  # the parser has methods of ours: the circle would wait for a look at everything
        self.pool.drop(self)
        stale = self.reused and not self.answered and self.loop.time() - self._sent_at < STALE_S
        if self.sink is not None and stale and self._retry is not None:
            sink, parts = self.sink, self._retry
            self.sink = None
            self.pool.redial(self.address, parts, sink)
            return
        self._lose(str(exc) if exc else "connection closed")

    # -- httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("headers are too long")
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status >= 200 and self.sink is not None:
            lengths = [n for n, _ in self._headers if n.lower() in (b"content-length", b"transfer-encoding")]
            if not lengths and self._status not in (204, 304):
                self._lose("the answer has no length, so its end could not be told")
                return
            if self._raw_head and self._status not in (204, 304):
                self._know(lengths)
            self.sink.on_head(self._status, self._headers)

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        self._between = False
        if self._status < 200:
            self._headers, self._raw_head = [], b""
            return
        self._pass_body()
        sink, self.sink = self.sink, None
        if sink is None:  # an answer that nobody asked for
            self.close()
            return
        self._finish(keep_alive=self._parser.should_keep_alive())
        sink.on_end()

    # -- used by pool and relay

    def send(self, parts: Sequence[bytes], sink: Sink) -> None:
        """Writes one request, at the end of this turn of the loop. The bytes are kept until the first answer byte, for the silent second try."""
        assert self.transport is not None and self.sink is None
        self.sink, self.answered, self._headers, self._head_bytes, self._parser = sink, False, [], 0, None
        self._retry = tuple(parts) if self.reused else None
        self._sent_at = self.loop.time()
        self._unsent = parts
        self.pool.outbox.add(self._write)

    def _write(self) -> None:
        parts, self._unsent = self._unsent, ()
        if self.transport is not None and parts and not self.transport.is_closing():
            self.transport.writelines(parts)

    def keep_little(self) -> None:
        """The kernel holds no more for us than we may hold for a client that does not read: all it has comes in one piece."""
        if self.transport is not None and (sock := self.transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)

    def pause(self) -> None:
        if self.transport is not None and not self._paused:
            self._paused = True
            with contextlib.suppress(RuntimeError):
                self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.transport is not None:
            self._paused = False
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()

    def close(self) -> None:
        """Ends the connection at once; its sink hears nothing more."""
        self.sink = None
        if self.transport is not None:
            self.transport.abort()

    def _pass_body(self) -> None:
        """What came together goes on together: an event costs four times its bytes while it waits in a transport on its own."""
        pieces = self._pieces
        if pieces:
            self._pieces = []
            if self.sink is not None:
                self.sink.on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _know(self, lengths: list[bytes]) -> None:
        """Keeps the head that was just read, when its answer may come whole behind it and the connection goes on."""
        raw, self._raw_head = self._raw_head, b""
        plain = len(raw) <= MAX_KNOWN_HEAD and raw.count(b"\r\n") == raw.count(b"\n") == len(self._headers) + 2
        if plain and lengths and len(set(lengths)) == 1 and lengths[0].lower() == b"content-length" and self._parser.should_keep_alive():
            length = next(int(v) for n, v in self._headers if n.lower() == b"content-length")
            if len(self.pool.heads) >= MAX_HEADS:
                self.pool.heads.clear()
            self.pool.heads[raw] = KnownHead(self._status, self._headers, length)

    def _whole(self, head: KnownHead, body: bytes) -> None:
        """An answer that came in one piece behind a known head."""
        sink = self.sink
        assert sink is not None
        self._status = head.status
        sink.on_head(head.status, head.headers)
        if body and self.sink is sink:
            sink.on_body(body)
        if self.sink is sink:  # it may have ended the request
            self.sink = None
            self._finish(keep_alive=True)
            sink.on_end()

    def _finish(self, *, keep_alive: bool) -> None:
        if keep_alive and self.transport is not None and not self._unsent and not self.transport.get_write_buffer_size():
            self.pool.keep(self)
        else:
            self.close()

    def _lose(self, why: str) -> None:
        sink = self.sink
        self.close()
        if sink is not None:
            sink.on_lost(errors.worker_lost(f"{self.address[0]}:{self.address[1]}", why))


class Handle(Sink):
    """A request under way: the right to end it. Survives the silent reconnect. It passes the answer to the caller's sink until it is closed."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None
        self.done = False

    def close(self) -> None:
        """Ends the request at once: nothing more reaches its sink."""
        self.done = True
        if self.task is not None:
            self.task.cancel()
        if self.connection is not None and self.connection.sink is not None:
            self.connection.close()

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    # -- what a connection tells

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.sink.on_head(status, headers)

    def on_body(self, data: bytes) -> None:
        self.sink.on_body(data)

    def on_end(self) -> None:
        self.done, self.connection = True, None
        try:
            self.sink.on_end()
        except Exception:  # the parser would swallow it, and the request would have no end
            log.exception("an answer's end could not be handled")
            text = "a worker's answer could not be handled; the router's log has the cause"
            self.sink.on_lost(ApiError(502, text, type="server_error", code="bad_worker_answer"))

    def on_lost(self, error: ApiError) -> None:
        self.done, self.connection = True, None
        self.sink.on_lost(error)


class Pool:
    """Connections to all workers."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._idle: dict[tuple[str, int], deque[Connection]] = {}
        self._open: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.outbox = Outbox(self.loop)
        self.alarms = Alarms(self.loop)
        self.heads: dict[bytes, KnownHead] = {}  # by their bytes, up to the empty line

    def start(self, host: str, port: int, parts: Sequence[bytes], sink: Sink) -> Handle:
        """Sends a request; returns at once. Its outcome, a failed connect included, reaches the sink."""
        handle = Handle(sink)
        connection = self._reusable((host, port))
        if connection is not None:
            handle.connection = connection
            connection.send(parts, handle)
        else:
            self._dial((host, port), tuple(parts), handle)
        return handle

    def redial(self, address: tuple[str, int], parts: tuple[bytes, ...], sink: Sink) -> None:
        """The second try of a request whose kept connection was dead."""
        assert isinstance(sink, Handle)
        self._dial(address, parts, sink)

    def keep(self, connection: Connection) -> None:
        """Takes back a connection whose answer is complete."""
        connection.resume()
        idle = self._idle.get(connection.address)
        if idle is None:
            idle = self._idle[connection.address] = deque()
        connection.idle_since = connection.loop.time()
        idle.append(connection)
        if len(idle) > MAX_IDLE:
            idle.popleft().close()

    def drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.address)
        if idle is not None:
            with contextlib.suppress(ValueError):
                idle.remove(connection)
            if not idle:
                self._idle.pop(connection.address, None)

    async def close(self) -> None:
        """Ends every connection and dial."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._open):
            connection.close()

    def _reusable(self, address: tuple[str, int]) -> Connection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                continue
            if connection.loop.time() - connection.idle_since > IDLE_LIFE_S:
                connection.close()
                continue
            connection.reused = True
            return connection
        return None

    def _dial(self, address: tuple[str, int], parts: tuple[bytes, ...], handle: Handle) -> None:
        task = self.loop.create_task(self._connect(address, parts, handle))
        handle.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, address: tuple[str, int], parts: tuple[bytes, ...], handle: Handle) -> None:
        loop = self.loop
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: Connection(self, address), *address)
        except (OSError, TimeoutError) as e:
            handle.task = None
            handle.on_lost(_connect_error(address, e))
            return
        handle.task = None
        connection.keep_little()
        if connection.transport is None:  # it was reset before this task had its turn
            handle.on_lost(errors.worker_unreachable(f"{address[0]}:{address[1]}", "the connection was reset at once"))
            return
        self._open.add(connection)
        if handle.done:
            connection.close()
            return
        handle.connection = connection
        connection.send(parts, handle)


def _connect_error(address: tuple[str, int], e: OSError) -> ApiError:
    """A worker is not to blame when this process may open no more files."""
    if e.errno in (errno.EMFILE, errno.ENFILE):
        return errors.out_of_files()
    why = (
        "no connection within 3 s" if isinstance(e, TimeoutError) else os.strerror(e.errno).lower() if e.errno is not None and e.errno > 0 else str(e)
    )
    return errors.worker_unreachable(f"{address[0]}:{address[1]}", why)


class _Collect(Sink):
    """Sink of `fetch`."""

    def __init__(self, limit: int) -> None:
        self.future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.body = bytearray()
        self.limit = limit

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > self.limit and not self.future.done():
            self.future.set_exception(ApiError(502, f"the answer is longer than {self.limit} bytes", type="server_error", code="bad_worker_answer"))

    def on_end(self) -> None:
        if not self.future.done():
            self.future.set_result((self.status, bytes(self.body)))

    def on_lost(self, error: ApiError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


async def fetch(
    pool: Pool, host: str, port: int, method: str, path: str, *,
    body: bytes = b"", headers: Sequence[tuple[str, str]] = (), timeout_s: float, limit_bytes: int = 1 << 20,
) -> tuple[int, bytes]:  # fmt: skip
    """One small question to a worker. Raises ApiError when there is no whole answer within the time."""
    parts = request_parts(host, port, method, path, headers, body, "application/json")
    return await collect(pool, host, port, parts, what=path, timeout_s=timeout_s, limit_bytes=limit_bytes)


async def collect(
    pool: Pool, host: str, port: int, parts: Sequence[bytes], *, what: str, timeout_s: float, limit_bytes: int = 1 << 20
) -> tuple[int, bytes]:
    """Sends a request and gives status and body of its answer. Raises ApiError when there is no whole one within the time."""
    sink = _Collect(limit_bytes)
    handle = pool.start(host, port, parts, sink)
    try:
        async with asyncio.timeout(timeout_s):
            return await sink.future
    except TimeoutError:
        raise errors.worker_timeout(f"{host}:{port}", f"did not answer {what}", timeout_s, "a fixed limit") from None
    finally:
        handle.close()


def request_parts(
    host: str, port: int, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, content_type: str, behind: bytes = b""
) -> tuple[bytes, ...]:
    """The bytes of a request: head, and body when there is one. Args: behind: the body's second part."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    about = f"Content-Type: {content_type}\r\nContent-Length: {len(body) + len(behind)}\r\n" if body or method == "POST" else ""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    head = f"{method} {path} HTTP/1.1\r\nHost: {where}\r\n{lines}{about}\r\n".encode("latin-1")
    return (head, body, behind) if behind else (head, body) if body else (head,)
