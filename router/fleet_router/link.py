"""The unix socket between the edge process and the control process: framed msgpack, questions with answers and one-way news.

The socket has an abstract name (no file to leave behind, works with a read-only root); only processes of the same user get in.
Source of the peer check: unix(7), SO_PEERCRED.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from msgspec import Struct

from fleet_contract.errors import ApiError
from fleet_router.observed import Observed

log = logging.getLogger(__name__)

MAX_FRAME: Final = 256 << 20
_length = struct.Struct("<I")
_ucred = struct.Struct("3i")


class Ask(Struct, tag="ask"):
    """A question of the control process: `what` is a method of the edge's answerer."""

    id: int
    what: str
    args: list[str] = []
    body: bytes = b""


class Reply(Struct, tag="reply"):
    """The answer: JSON or msgpack bytes as the question says, or an error's status and JSON body."""

    id: int
    status: int = 200
    body: bytes = b""


class News(Struct, tag="news"):
    """Discovery's snapshot."""

    observed: Observed


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Ask | Reply | News] = msgspec.msgpack.Decoder(Ask | Reply | News)


def listen(name: str) -> socket.socket:
    """The edge's side of the link, listening. Linux only."""
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    s.bind("\0" + name)
    s.listen(8)
    s.setblocking(False)
    return s


async def _receive(reader: asyncio.StreamReader) -> Ask | Reply | News:
    (length,) = _length.unpack(await reader.readexactly(_length.size))
    if length > MAX_FRAME:
        raise ConnectionError(f"frame of {length} bytes on the link")
    return _decoder.decode(await reader.readexactly(length))


def _send(writer: asyncio.StreamWriter, message: Ask | Reply | News) -> None:
    body = _encoder.encode(message)
    writer.writelines((_length.pack(len(body)), body))


class LinkServer:
    """The edge's side: answers questions, takes news."""

    def __init__(self, answer: Callable[[Ask], Awaitable[bytes]], on_news: Callable[[Observed], None]) -> None:
        self._answer = answer
        self._on_news = on_news
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        answers: set[asyncio.Task[None]] = set()
        try:
            peer = writer.get_extra_info("socket")
            if _ucred.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ucred.size))[1] != os.geteuid():
                return
            while True:
                message = await _receive(reader)
                if isinstance(message, Ask):
                    one = asyncio.get_running_loop().create_task(self._reply(message, writer))
                    answers.add(one)
                    one.add_done_callback(answers.discard)
                elif isinstance(message, News):
                    self._on_news(message.observed)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for one in answers:
                one.cancel()
            writer.close()

    async def _reply(self, ask: Ask, writer: asyncio.StreamWriter) -> None:
        try:
            reply = Reply(ask.id, 200, await self._answer(ask))
        except ApiError as e:
            reply = Reply(ask.id, e.status, e.body(""))
        except Exception:  # the request border: logged and answered
            log.exception("question %s failed", ask.what)
            reply = Reply(
                ask.id, 500, ApiError(500, "the router failed on this question; see its log", type="server_error", code="internal").body("")
            )
        with contextlib.suppress(ConnectionError):
            _send(writer, reply)
            await writer.drain()


class LinkClient:
    """The control process's side: keeps a connection, asks, sends news again after each reconnect."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next = 0
        self._news: Observed | None = None

    async def run(self) -> None:
        """Connects, and connects again when the edge was restarted. Ends by cancellation."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection("\0" + self._name)
                if self._news is not None:
                    _send(self._writer, News(self._news))
                while True:
                    message = await _receive(reader)
                    if isinstance(message, Reply) and (future := self._waiting.pop(message.id, None)) is not None and not future.done():
                        future.set_result(message)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                if self._writer is not None:
                    self._writer.close()
                self._writer = None
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(ConnectionError("the edge process went away"))
                self._waiting.clear()
            await asyncio.sleep(0.05)

    def send_news(self, observed: Observed) -> None:
        """The last snapshot reaches the edge now or when it is back."""
        self._news = observed
        if self._writer is not None:
            _send(self._writer, News(observed))

    async def ask(self, what: str, *args: str, body: bytes = b"", timeout_s: float = 3.0) -> Reply:
        """One question. Raises ApiError 503 when the edge does not answer."""
        unavailable = ApiError(
            503, "the router's data process does not answer; it is being restarted", type="overloaded_error", code="brain_away", retry_after_s=1
        )
        if self._writer is None:
            raise unavailable
        self._next += 1
        number = self._next
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        _send(self._writer, Ask(number, what, list(args), body))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except (TimeoutError, ConnectionError):
            raise unavailable from None
        finally:
            self._waiting.pop(number, None)
