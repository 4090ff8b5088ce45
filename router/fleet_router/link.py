"""The link: the unix socket of the process that decides, and the channels over it. Control asks over one, each edge works over one.

The socket has an abstract name (no file to leave behind, works with a read-only root); only processes of the same user get in.
Source of the peer check: unix(7), SO_PEERCRED.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Final, cast

import msgspec

from fleet_contract.errors import ApiError
from fleet_router.messages import Ask, Message, News, Reply
from fleet_router.observed import Observed

log = logging.getLogger(__name__)

MAX_FRAME: Final = 2 << 30  # a question may carry a request's body
MAX_BUFFERED: Final = 256 << 20  # beyond its last frame: a peer that does not read is as good as dead
RECONNECT_S: Final = 0.05
NO_EDGE: Final = "no_edge"  # state of a brain that is new: its edges serve by the safe rule until they have found it
_length = struct.Struct("<I")
_ucred = struct.Struct("3i")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])

Answer = Callable[[Ask], Awaitable[bytes]]


def listen(name: str) -> socket.socket:
    """A listening end. Linux only."""
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    s.bind("\0" + name)
    s.listen(128)
    s.setblocking(False)
    return s


def edge_link_name(link_name: str, index: int) -> str:
    """Where an edge itself can be asked whether it serves, when the brain is away."""
    return f"{link_name}-edge-{index}"


def brain_away() -> ApiError:
    text = "the router's deciding process does not answer; it is being restarted"
    return ApiError(503, text, type="overloaded_error", code="brain_away", retry_after_s=1)


async def no_answers(ask: Ask) -> bytes:
    """For an end that is asked nothing."""
    raise ValueError(f"unknown question {ask.what!r}")


class Channel(asyncio.Protocol):
    """One connection of the link, the same at both ends: messages both ways, and questions with answers.

    All that is sent in one turn of the event loop leaves as one frame, in order. A peer that breaks the rules is cut off.
    """

    def __init__(
        self, on_message: Callable[[Channel, Message], None], on_lost: Callable[[Channel], None], answer: Answer,
        on_made: Callable[[Channel], None] = lambda channel: None,
    ) -> None:  # fmt: skip
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_made = on_made
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._out: list[Message] = []
        self._in = bytearray()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._next = 0
        self.heard_at = self._loop.time()
        self.lost = asyncio.Event()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket")
        if _ucred.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ucred.size))[1] != os.geteuid():
            self._transport.abort()
            return
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            self._read(data)
        except Exception:  # the border between two processes: a message that breaks us must not end all others
            log.exception("a message on the link could not be handled: the connection is closed")
            self._in = bytearray()
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("the other process went away"))
        self._waiting.clear()
        for task in self._answers:
            task.cancel()
        self.lost.set()
        self._on_lost(self)

    # -- used by its owner

    def send(self, message: Message) -> None:
        """Leaves with all else of this turn of the loop; is dropped when the connection is gone."""
        if self._transport is None:
            return
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(message)

    def flush(self) -> None:
        """Writes what was sent."""
        if self._transport is None or not self._out:
            self._out.clear()
            return
        if self._transport.get_write_buffer_size() > MAX_BUFFERED:
            log.error("a process does not read from the link: the connection is closed")
            self.abort()
            return
        body = _encoder.encode(self._out)
        self._out.clear()
        self._transport.writelines((_length.pack(len(body)), body))

    async def ask(self, what: str, *args: str, body: bytes = b"", timeout_s: float) -> Reply:
        """One question. Raises ConnectionError or TimeoutError without an answer."""
        if self._transport is None:
            raise ConnectionError("not connected")
        self._next += 1
        number = self._next
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[number] = future
        self.send(Ask(number, what, list(args), body))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """What was sent still leaves."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Now."""
        if self._transport is not None:
            self._transport.abort()

    # -- inside

    def _read(self, data: bytes) -> None:
        """Takes all messages of whole frames. Raises what these raise."""
        if not self._in and len(data) >= _length.size and _length.unpack_from(data)[0] == len(data) - _length.size:  # one frame: nearly always
            for message in _decoder.decode(memoryview(data)[_length.size :]):
                self._take(message)
            return
        self._in += data
        at = 0
        while len(self._in) - at >= _length.size:
            (length,) = _length.unpack_from(self._in, at)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._in) - at - _length.size < length:
                break
            with memoryview(self._in) as view:
                batch = _decoder.decode(view[at + _length.size : at + _length.size + length])
            at += _length.size + length
            for message in batch:
                self._take(message)
        del self._in[:at]

    def _take(self, message: Message) -> None:
        if isinstance(message, Reply):
            future = self._waiting.pop(message.id, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Ask):
            task = self._loop.create_task(self._reply(message))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
        else:
            self._on_message(self, message)

    async def _reply(self, ask: Ask) -> None:
        try:
            reply = Reply(ask.id, 200, await self._answer(ask))
        except ApiError as e:
            reply = Reply(ask.id, e.status, e.body(""))
        except Exception:  # the request border: logged and answered
            log.exception("question %s failed", ask.what)
            reply = Reply(
                ask.id, 500, ApiError(500, "the router failed on this question; see its log", type="server_error", code="internal").body("")
            )
        self.send(reply)


class LinkServer:
    """A listening end."""

    def __init__(self, make: Callable[[], Channel]) -> None:
        self._make = make
        self._channels: set[Channel] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Ends every channel."""
        if self._server is not None:
            self._server.close()
        channels = [c for c in self._channels if not c.lost.is_set()]
        for channel in channels:
            channel.close()
        await asyncio.gather(*(c.lost.wait() for c in channels))

    def _accept(self) -> Channel:
        self._channels = {c for c in self._channels if not c.lost.is_set()}
        channel = self._make()
        self._channels.add(channel)
        return channel


async def connect(name: str, make: Callable[[], Channel]) -> Channel:
    """The other end. Raises OSError when nobody listens."""
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        s.connect("\0" + name)
    except OSError:
        s.close()
        raise
    _, channel = await asyncio.get_running_loop().create_unix_connection(make, sock=s)
    return channel


async def keep_connected(name: str, make: Callable[[], Channel]) -> None:
    """Connects, and again whenever the connection is lost. Ends by cancellation only."""
    while True:
        try:
            channel = await connect(name, make)
            await channel.lost.wait()
        except OSError:
            pass
        await asyncio.sleep(RECONNECT_S)


class LinkClient:
    """The control process's end: asks, and sends news again after each reconnect."""

    def __init__(self, name: str, edges: int = 0) -> None:
        """`edges`: so many edge processes can be asked when the brain is away."""
        self._name = name
        self._edges = edges
        self._channel: Channel | None = None
        self._news: Observed | None = None

    async def run(self) -> None:
        """Keeps the connection. Ends by cancellation."""
        await keep_connected(self._name, lambda: Channel(lambda c, m: None, self._lost, no_answers, self._made))

    def send_news(self, observed: Observed) -> None:
        """The last snapshot reaches the brain now or when it is back."""
        self._news = observed
        if self._channel is not None:
            self._channel.send(News(observed))

    async def ask(self, what: str, *args: str, body: bytes = b"", timeout_s: float = 3.0) -> Reply:
        """One question. Raises ApiError 503 when the brain does not answer."""
        if self._channel is None:
            raise brain_away()
        try:
            return await self._channel.ask(what, *args, body=body, timeout_s=timeout_s)
        except (TimeoutError, ConnectionError):
            raise brain_away() from None

    async def ask_ready(self) -> Reply:
        """Whether this router serves: what the brain says, without a brain, or before one has its edges, what any edge says.

        Raises ApiError 503 when none answers.
        """
        try:
            reply = await self.ask("ready", timeout_s=1.0)
        except ApiError:
            said = await self._ask_any_edge()
            if said is None:
                raise
            return said
        if msgspec.json.decode(reply.body).get("status") == NO_EDGE:
            return await self._ask_any_edge() or reply
        return reply

    async def _ask_any_edge(self) -> Reply | None:
        for index in range(self._edges):
            if (reply := await self._ask_edge(index)) is not None:
                return reply
        return None

    async def _ask_edge(self, index: int) -> Reply | None:
        try:
            channel = await connect(edge_link_name(self._name, index), lambda: Channel(lambda c, m: None, lambda c: None, no_answers))
        except OSError:
            return None
        try:
            return await channel.ask("ready", timeout_s=0.3)
        except (TimeoutError, ConnectionError):
            return None
        finally:
            channel.close()

    def _made(self, channel: Channel) -> None:
        self._channel = channel
        if self._news is not None:
            channel.send(News(self._news))

    def _lost(self, channel: Channel) -> None:
        self._channel = None
