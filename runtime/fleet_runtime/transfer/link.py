"""One transfer connection: Hello both ways, frames, pings. Used by both ends; runs on the I/O thread.

Control messages overtake page frames that wait, so a ping is never late because of a large transfer; within each kind order is kept. A frame
is written whole. Any byte of the peer is a sign of life. Silence is counted in our own ticks, not in seconds, so that a process that was
itself frozen or starved does not take its peer for dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final, Protocol

from fleet_contract import handoff
from fleet_contract.handoff import FRAME_HEADER, Failed, FrameError, Handoff, Hello, Pages, Ping
from fleet_runtime.transfer.base import Event, PageAccess, TransferCounters

log = logging.getLogger(__name__)
MISSES: Final = 3  # ticks of silence that are forgiven
HELLO_TIMEOUT_S: Final = 3.0
# Every field but these must be equal on both sides.
_OWN_FIELDS: Final = ("incarnation", "pod_uid", "rank")


@dataclass(slots=True)
class Settings:
    """Times of a transfer; tests shorten them."""

    tick_s: float = 1.0
    transfer_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    other_leg_s: float = 10.0  # how long a room waits for its other leg to show up at all
    prefill_tokens_per_s: float = 0.0
    bytes_per_s: float = 50e6  # a slow network, for the prediction
    hold: bool = False  # fault injection: send no page

    def limit_s(self, *, tokens: int, size_bytes: int) -> float:
        """The transfer timer: how long a room may take from its first page."""
        compute = tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
        return max(self.transfer_timeout_s, 3 * (compute + size_bytes / self.bytes_per_s))


@dataclass(slots=True)
class Shared:
    """What the parts of one transfer share."""

    hello: Hello
    pages: PageAccess
    settings: Settings
    emit: Callable[[Event], None]
    counters: TransferCounters = field(default_factory=TransferCounters)
    beats: int = 0  # of our scheduler's loop


# Takes page i of a `Pages` message; returns nothing. None: the payload is read and dropped.
Sink = Callable[[int, bytes], None]


class Handler(Protocol):
    """One end's rooms."""

    def on_message(self, link: Link, message: Handoff) -> None: ...

    def on_pages(self, link: Link, message: Pages) -> Sink | None: ...

    def on_pages_end(self, link: Link, message: Pages) -> None: ...

    def on_closed(self, link: Link, cause: str) -> None: ...


class HelloError(Exception):
    """The two ends do not fit; the message says where."""


class Link:
    """See the module."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shared: Shared, handler: Handler) -> None:
        self.peer = Hello()
        self.closed = False
        self._reader = reader
        self._writer = writer
        self._shared = shared
        self._handler = handler
        self._control: deque[bytes] = deque()
        self._bulk: deque[Callable[[], bytes | None]] = deque()
        self._wake = asyncio.Event()
        self._heard = True
        self._silent_ticks = 0
        self._pings = 0
        self._peer_steps = -1
        self._still_ticks = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """The peer, for messages to people."""
        return f"{self.peer.pod_uid or 'unknown'} (incarnation {self.peer.incarnation or 'unknown'})"

    async def greet(self) -> None:
        """Exchanges Hello. Raises HelloError on a mismatch, OSError, FrameError or TimeoutError otherwise."""
        self._writer.write(handoff.encode(self._shared.hello))
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            size, payload = handoff.decode_header(await self._reader.readexactly(FRAME_HEADER.size))
            message = handoff.decode(await self._reader.readexactly(size))
        if isinstance(message, Failed):
            raise HelloError(message.message)
        if not isinstance(message, Hello) or payload:
            raise FrameError("the first message is not Hello")
        self.peer = message
        if (text := mismatch(self._shared.hello, message)) is not None:
            self._writer.write(handoff.encode(Failed(status=503, code="incompatible_peer", message=text)))
            raise HelloError(text)

    def start(self) -> None:
        """Reads and writes from now on, until `close`."""
        self._tasks = [asyncio.ensure_future(self._guard(self._read)), asyncio.ensure_future(self._guard(self._write))]

    def send(self, message: Handoff) -> None:
        """Queues a control message."""
        if not self.closed:
            self._control.append(handoff.encode(message))
            self._wake.set()

    def send_bulk(self, make: Callable[[], bytes | None]) -> None:
        """Queues a frame that is made when its turn comes; None then: it is no longer wanted."""
        if not self.closed:
            self._bulk.append(make)
            self._wake.set()

    def tick(self) -> None:
        """Once a tick: pings, and closes a connection whose peer is silent or whose scheduler stands still."""
        settings = self._shared.settings
        self._silent_ticks = 0 if self._heard else self._silent_ticks + 1
        self._heard = False
        self._still_ticks += 1
        if self._silent_ticks >= MISSES:
            self.close(f"{self.name} missed {MISSES} pings")
        elif self._still_ticks * settings.tick_s > settings.stall_timeout_s:
            self.close(f"the scheduler of {self.name} has not moved for {settings.stall_timeout_s:g} s")
        else:
            self._pings += 1
            self.send(Ping(incarnation=self._shared.hello.incarnation, n=self._pings, steps=self._shared.beats))

    def close(self, cause: str) -> None:
        """Ends the connection at once; the handler hears of it once."""
        if self.closed:
            return
        self.closed = True
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._writer.transport.abort()
        self._control.clear()
        self._bulk.clear()
        self._handler.on_closed(self, cause)

    async def _guard(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Whatever ends reading or writing ends the connection; an unforeseen exception is logged and ends only this connection."""
        try:
            await work()
        except asyncio.IncompleteReadError:
            self.close(f"{self.name} closed the connection")
        except (OSError, FrameError) as e:
            self.close(f"the connection to {self.name} broke: {e}")
        except Exception as e:
            log.exception("the connection to %s failed", self.name)
            self.close(f"the connection to {self.name} failed: {e}")

    async def _read(self) -> None:
        while True:
            size, payload = handoff.decode_header(await self._reader.readexactly(FRAME_HEADER.size))
            message = handoff.decode(await self._reader.readexactly(size))
            self._heard = True
            if isinstance(message, Pages):
                await self._read_pages(message, payload)
                continue
            if payload:
                raise FrameError(f"{payload} bytes of payload behind a message that has none")
            if isinstance(message, Ping):
                if message.steps != self._peer_steps:
                    self._peer_steps, self._still_ticks = message.steps, 0
            elif isinstance(message, Failed) and message.room == 0:
                self.close(f"{self.name} ended the connection: {message.message}")
            elif message is not None:
                self._handler.on_message(self, message)

    async def _read_pages(self, message: Pages, payload: int) -> None:
        size = self._shared.hello.page_bytes
        if payload != message.count * size or len(message.crc) != message.count:
            raise FrameError(f"{payload} bytes and {len(message.crc)} checksums for {message.count} pages of {size} bytes")
        sink = self._handler.on_pages(self, message)
        for i in range(message.count):
            data = await self._reader.readexactly(size)
            self._heard = True
            if sink is not None:
                sink(i, data)
        self._handler.on_pages_end(self, message)

    async def _write(self) -> None:
        while True:
            while self._control:
                self._writer.write(self._control.popleft())
            if self._bulk and (frame := self._bulk.popleft()()) is not None:
                self._writer.write(frame)
            await self._writer.drain()
            if not self._control and not self._bulk:
                self._wake.clear()
                await self._wake.wait()


def mismatch(mine: Hello, theirs: Hello) -> str | None:
    """What keeps two workers from handing pages over, in words; None if nothing."""
    words = [
        f"{name} is {getattr(mine, name)!r} here and {getattr(theirs, name)!r} there"
        for name in Hello.__struct_fields__
        if name not in _OWN_FIELDS and getattr(mine, name) != getattr(theirs, name)
    ]
    if not words:
        return None
    return f"workers {mine.pod_uid} and {theirs.pod_uid} cannot hand pages over: {'; '.join(words)}"
