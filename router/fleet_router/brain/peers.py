"""The sockets between routers in front of the same workers: what `decide.peers` says goes out, what others say comes in.

Lives on the brain's event loop. Our picks leave at once, or, when the last message is younger than COALESCE_S, together when it is not any
more. The whole state leaves each second, and as soon as somebody subscribes. Whoever reads slowly loses messages and gets the next whole one.
Trust is the network, as on the control port: a router reads only the addresses it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from fleet_contract import names
from fleet_router.brain.brain import Brain
from fleet_router.brain.worker import Worker
from fleet_router.decide.peers import Identity, PeerBook, PeerMessage
from fleet_router.errors import UNDECODABLE
from fleet_router.grid import Presence, call_on_tick
from fleet_router.observed import RouterFacts

log = logging.getLogger(__name__)

COALESCE_S: Final = 0.002
WHOLE_S: Final = 1.0
TICK_S: Final = 0.25
HWM: Final = 1_000  # messages
MAX_MESSAGE_BYTES: Final = 16 << 20
GOODBYE_MS: Final = 200  # for the last message to leave


class PeerExchange:
    """`start` makes it a watcher of the brain."""

    def __init__(self, brain: Brain) -> None:
        self._brain = brain
        deciding = brain.deciding
        self._book = PeerBook(deciding.load, brain.pick_id, deciding.rivals, deciding, brain.limits.book)
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.BLOCKY, 0)  # its end waits for nobody, also when it is only forgotten
        self._decoder = msgspec.msgpack.Decoder(PeerMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._loop = asyncio.get_running_loop()
        self._out: Any = None
        self._readers: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by peer: its address
        self._subscriptions: asyncio.Task[None] | None = None
        self._sending: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._presence = Presence()
        self._sent_at = self._whole_at = float("-inf")

    def start(self, listener: socket.socket) -> None:
        """Speaks from now on. Args: listener: the peer port, bound and listening."""
        address = listener.getsockname()
        host = f"[{address[0]}]" if listener.family == socket.AF_INET6 else address[0]
        self._out = out = self._context.socket(zmq.XPUB)
        for option, value in ((zmq.LINGER, GOODBYE_MS), (zmq.SNDHWM, HWM), (zmq.XPUB_VERBOSE, 1), (zmq.IPV6, int(host.startswith("[")))):
            out.setsockopt(option, value)
        out.setsockopt(zmq.USE_FD, listener.detach())
        out.bind(f"tcp://{host}:{address[1]}")
        self._subscriptions = self._loop.create_task(self._greet())
        self._brain.deciding.load.on_unsent = self._brain.deciding.rivals.on_changed = self._plan
        self._brain.peers = self.report
        self._brain.watch(self)
        self._tick()

    async def close(self) -> None:
        """Takes its leave."""
        self._brain.unwatch(self)
        self._brain.deciding.load.on_unsent = self._brain.deciding.rivals.on_changed = lambda: None
        for handle in (self._timer, self._sending):
            if handle is not None:
                handle.cancel()
        self._send(self._book.farewell())
        for key in list(self._readers):
            await self._end(key)
        if self._subscriptions is not None:
            await _cancelled(self._subscriptions)
        self._context.destroy(linger=GOODBYE_MS)

    # -- who there is

    def set_addresses(self, addresses: dict[str, str]) -> None:
        """The other routers: HOST:PORT by any lasting name. Our own may be among them: it is told by what it says."""
        self._book.expect(addresses.keys())
        for key, (address, task) in list(self._readers.items()):
            if addresses.get(key) != address:
                task.cancel()
                del self._readers[key]
        for key, address in addresses.items():
            if key not in self._readers:
                self._readers[key] = (address, self._loop.create_task(self._read(key, address)))

    def set_routers(self, routers: list[RouterFacts], port: int) -> None:
        """The router pods of a discovery snapshot; all listen on the same port."""
        self.set_addresses({r.uid: f"{f'[{r.ip}]' if ':' in r.ip else r.ip}:{port}" for r in routers if r.ip and not r.terminal})

    def report(self) -> dict[str, int]:
        """How many other routers there should be, and how many are heard."""
        return {"expected": self._book.expected, "live": self._book.live}

    # -- brain.WorkerWatcher

    def added(self, worker: Worker) -> None:
        """A new incarnation."""
        self._book.worker_added(_identity(worker), worker.load)

    def gone(self, worker: Worker) -> None:
        """An incarnation is over."""
        self._book.worker_gone(worker.load)

    # -- out

    def _plan(self) -> None:
        """Something is to be said."""
        if self._sending is None:
            due = self._sent_at + COALESCE_S
            soon = due <= self._loop.time()
            self._sending = self._loop.call_soon(self._send_changes) if soon else self._loop.call_at(due, self._send_changes)

    def _send_changes(self) -> None:
        self._sending = None
        message = self._book.changes(self._brain.clock())
        if message is not None:
            self._send(message)

    def _send(self, message: PeerMessage) -> None:
        self._sent_at = self._loop.time()
        self._out.send(self._encoder.encode(message))  # never waits: a PUB socket drops what a reader cannot take

    def _send_whole(self) -> None:
        self._whole_at = self._loop.time()
        self._send(self._book.everything(self._brain.clock()))

    async def _greet(self) -> None:
        """Whoever subscribes gets the whole state at once."""
        while True:
            if (await self._out.recv()).startswith(b"\1"):
                self._send_whole()

    def _tick(self) -> None:
        timer, self._timer = self._timer, call_on_tick(self._loop, TICK_S, self._tick)
        if self._loop.time() - self._whole_at >= WHOLE_S - TICK_S / 2:
            self._send_whole()
        if timer is not None and not self._presence.is_sure(self._loop.time(), timer.when()):
            return  # what the others have said meanwhile is read first
        silent = self._book.tick(self._brain.clock())
        for peer in silent:
            self._brain.counters.add("peer_silences_total")
            log.warning("another router is silent: its picks do not count any more", extra={"peer": peer.key, "peer_router": peer.router})
        if silent:
            self._brain.load_changed()

    # -- in

    async def _read(self, key: str, address: str) -> None:
        """One other router, for as long as it is expected."""
        reader = self._context.socket(zmq.SUB)
        try:
            for option, value in (
                (zmq.LINGER, 0), (zmq.RCVHWM, HWM), (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES), (zmq.RECONNECT_IVL, 100), (zmq.RECONNECT_IVL_MAX, 1_000),
                (zmq.HEARTBEAT_IVL, 1_000), (zmq.HEARTBEAT_TIMEOUT, 3_000), (zmq.CONNECT_TIMEOUT, 2_000), (zmq.IPV6, int(address.startswith("["))),
            ):  # fmt: skip
                reader.setsockopt(option, value)
            reader.setsockopt(zmq.SUBSCRIBE, b"")
            reader.connect(f"tcp://{address}")
            while not self._book.peers[key].is_ourselves:
                self._take(key, await reader.recv())
                await asyncio.sleep(0)  # many messages at once do not hold the loop
        except zmq.ZMQError as e:
            log.error("another router cannot be read", extra={"peer": address, "reason": e.strerror})
        finally:
            reader.close()

    def _take(self, key: str, data: bytes) -> None:
        try:
            message = self._decoder.decode(data)
        except UNDECODABLE as e:
            log.warning("a message of another router cannot be read", extra={"peer": key, "reason": str(e)})
            return
        peer = self._book.peers[key]
        was_known = peer.known
        self._book.take(key, message, self._brain.clock())
        if peer.known and not was_known:
            log.info("another router shares the workers", extra={"peer": key, "peer_router": peer.router})
        self._brain.load_changed()

    async def _end(self, key: str) -> None:
        await _cancelled(self._readers.pop(key)[1])


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _identity(worker: Worker) -> Identity:
    """As every router knows it. What the life of another engine is called is each router's own guess, so there it does not count."""
    record = worker.record
    return (record.pod_uid, record.rank, record.incarnation if record.engine == names.ENGINE_OURS else "")
