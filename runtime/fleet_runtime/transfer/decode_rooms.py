"""The decode end of all rooms: dialling prefill workers, writing and checking pages, draining. Runs on the I/O thread.

A room is named by its generation, which this end minted. After a failure it stays, over, until the prefill worker has said that no page will
follow (`Drained` or `Failed`) or its connection is closed; only then may its pages be used for something else.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Final

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.handoff import Abort, Alloc, Done, Drained, Failed, FrameError, Handoff, Pages, Queued, Received
from fleet_runtime.transfer.base import DecodeClosed, DecodeComplete, DecodeFailed, DecodeOpen
from fleet_runtime.transfer.bootstrap import NotRegistered, RouteError, fetch_route, split_address
from fleet_runtime.transfer.link import MISSES, HelloError, Link, Shared, Sink

log = logging.getLogger(__name__)
ROUTE_TIMEOUT_S: Final = 3.0
DIAL_TIMEOUT_S: Final = 3.0
REGISTER_TRIES: Final = 10
REGISTER_PAUSE_S: Final = 0.2
STREAM_LIMIT_BYTES: Final = 1 << 20


@dataclass(slots=True, eq=False)
class _Room:
    generation: int
    room: int
    link: Link | None = None
    pages: list[int] | None = None  # ours, in order of Alloc.pages; None before Alloc
    here: set[int] = field(default_factory=set)  # indices of pages that are written
    prompt_tokens: int = 0
    prefill_incarnation: str = ""
    first_page_at: float | None = None
    silent_ticks: int = 0
    over: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    """One prefill worker's address: at most one connection, dialled by one room at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    link: Link | None = None
    users: int = 0  # rooms that wait for the lock


class _DialError(Exception):
    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class DecodeRooms:
    """See the module. Implements link.Handler for connections to prefill workers."""

    def __init__(self, shared: Shared, clock: Callable[[], float]) -> None:
        self.links: set[Link] = set()
        self._shared = shared
        self._clock = clock
        self._rooms: dict[int, _Room] = {}
        self._peers: dict[str, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # Commands of the scheduler.

    def dial(self, generation: int, room: int, bootstrap: str, incarnation: str) -> None:
        """See KvTransfer."""
        state = self._rooms[generation] = _Room(generation, room, prefill_incarnation=incarnation)
        self._spawn(self._open(state, bootstrap))

    def alloc(self, generation: int, prefix_pages: int, pages: Sequence[int], prompt_tokens: int) -> None:
        """See KvTransfer."""
        state = self._rooms.get(generation)
        if state is None or state.over or state.link is None:
            return
        state.pages, state.prompt_tokens = list(pages), prompt_tokens
        state.link.send(
            Alloc(
                room=state.room,
                generation=generation,
                prefill_incarnation=state.prefill_incarnation,
                prefix_pages=prefix_pages,
                pages=state.pages,
                slot=generation & 0xFFFF_FFFF,
            )
        )

    def abandon(self, generation: int, error: ApiError) -> None:
        """See KvTransfer."""
        state = self._rooms.get(generation)
        if state is not None and not state.over:
            self._drain(state, error)

    def reject(self, room: int, bootstrap: str, incarnation: str, error: ApiError) -> None:
        """A decode leg that was refused: its prefill worker hears why, if it can be reached."""

        async def tell() -> None:
            try:
                link = await self._link_to(bootstrap, incarnation)
            except _DialError as e:
                log.info("cannot tell prefill worker %s that room %d was refused: %s", bootstrap, room, e)
                return
            link.send(_ending(room, 0, error))

        self._spawn(tell())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Connecting.

    async def _open(self, state: _Room, bootstrap: str) -> None:
        try:
            link = await self._link_to(bootstrap, state.prefill_incarnation)
        except _DialError as e:
            if not state.over:
                self._close(state, e.error)
            return
        if state.over:  # abandoned meanwhile: nothing was promised, but the other leg must not wait
            link.send(Abort(room=state.room, generation=state.generation, reason="decode's request ended"))
            return
        if link.closed:
            self._close(state, _gone("the connection closed at once"))
            return
        state.link = link
        link.send(Queued(room=state.room, generation=state.generation))
        self._shared.emit(DecodeOpen(state.generation))

    async def _link_to(self, bootstrap: str, incarnation: str) -> Link:
        peer = self._peers.setdefault(bootstrap, _Peer())
        peer.users += 1
        try:
            async with peer.lock:
                link = peer.link
                if link is None or link.closed or incarnation not in ("", link.peer.incarnation):
                    link = peer.link = await self._dial(bootstrap, incarnation, link)
                return link
        except RouteError as e:
            raise _DialError(_gone(str(e))) from e
        except HelloError as e:
            raise _DialError(ApiError(503, str(e), type=errors.SERVER, code="incompatible_peer")) from e
        except (OSError, FrameError, TimeoutError, asyncio.IncompleteReadError) as e:
            raise _DialError(_gone(f"its transfer port cannot be reached: {e or type(e).__name__}")) from e
        finally:
            peer.users -= 1
            self._forget_unused()

    def _forget_unused(self) -> None:
        """Drops addresses that nobody waits for and that have no connection."""
        for address in [a for a, peer in self._peers.items() if not peer.users and (peer.link is None or peer.link.closed)]:
            del self._peers[address]

    async def _dial(self, bootstrap: str, incarnation: str, old: Link | None) -> Link:
        host, port = split_address(bootstrap)
        for attempt in range(REGISTER_TRIES):
            try:
                route = await fetch_route(host, port, timeout_s=ROUTE_TIMEOUT_S)
                break
            except NotRegistered:
                if attempt == REGISTER_TRIES - 1:
                    raise
                await asyncio.sleep(REGISTER_PAUSE_S)
        if incarnation not in ("", route.incarnation):
            raise _DialError(_stale(bootstrap, route.incarnation, incarnation))
        if old is not None and not old.closed:
            old.close(f"another incarnation answers at {bootstrap}")
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(route.transfer_host or host, route.transfer_port, limit=STREAM_LIMIT_BYTES)
        link = Link(reader, writer, self._shared, self)
        try:
            await link.greet()
            if incarnation not in ("", link.peer.incarnation):
                raise _DialError(_stale(bootstrap, link.peer.incarnation, incarnation))
        except BaseException:
            writer.close()
            raise
        self.links.add(link)
        link.start()
        return link

    # Messages of prefill.

    def on_message(self, link: Link, message: Handoff) -> None:
        """See link.Handler."""
        if not isinstance(message, Queued | Done | Drained | Failed):
            self._shared.counters.late_messages += 1
            return
        state = self._rooms.get(message.generation)
        if state is None or state.link is not link or state.room != message.room:
            self._shared.counters.late_messages += not isinstance(message, Drained)
            return
        state.silent_ticks = 0
        match message:
            case Done():
                self._on_done(state, message)
            case Drained():
                self._close(state, _gone("prefill drained a room that was not aborted"))
            case Failed():
                self._close(state, _derived(link, message))

    def on_pages(self, link: Link, message: Pages) -> Sink | None:
        """See link.Handler. The room is looked at again for each page: it may end while a frame is read."""
        state = self._rooms.get(message.generation)
        if state is None or state.link is not link or state.room != message.room or state.over:
            self._shared.counters.late_messages += 1
            return None
        state.silent_ticks = 0
        if state.pages is None or message.first < 0 or message.first + message.count > len(state.pages):
            count = 0 if state.pages is None else len(state.pages)
            text = f"pages {message.first} to {message.first + message.count} came for a room of {count} pages"
            self._fail(state, ApiError(500, text, type=errors.SERVER, code="transfer_failed"))
            return None
        if state.first_page_at is None:
            state.first_page_at = self._clock()
        return lambda i, data: self._write(state, message.first + i, data, message.crc[i])

    def on_pages_end(self, link: Link, message: Pages) -> None:
        """Nothing is left to do: pages are counted one by one."""

    def _write(self, state: _Room, index: int, data: bytes, crc: int) -> None:
        if state.over or state.pages is None:
            return
        state.silent_ticks = 0
        if index in state.here:
            self._shared.counters.late_messages += 1
            return
        if zlib.crc32(data) != crc:
            self._shared.counters.checksum_failures += 1
            text = f"page {index} of room {state.room} arrived with a wrong checksum"
            self._fail(state, ApiError(500, text, type=errors.SERVER, code="transfer_corrupt"))
            return
        self._shared.pages.write_page(state.pages[index], data)
        state.here.add(index)
        self._shared.counters.pages += 1
        self._shared.counters.bytes += len(data)

    def _on_done(self, state: _Room, message: Done) -> None:
        if state.over:
            return  # Drained or a closed connection still follows
        if state.pages is None or len(state.here) < len(state.pages):
            text = f"prefill was done with room {state.room} after {len(state.here)} of {len(state.pages or ())} pages"
            self._fail(state, ApiError(500, text, type=errors.SERVER, code="transfer_failed"))
            return
        assert state.link is not None
        state.link.send(Received(room=state.room, generation=state.generation))
        del self._rooms[state.generation]
        self._shared.counters.rooms += 1
        self._shared.emit(DecodeComplete(state.generation, message))

    def on_closed(self, link: Link, cause: str) -> None:
        """The prefill worker is gone, or unreachable: it can write no more."""
        self.links.discard(link)
        self._forget_unused()
        for state in [s for s in self._rooms.values() if s.link is link]:
            self._close(state, _gone(cause))

    # Ends.

    def _fail(self, state: _Room, error: ApiError) -> None:
        """Lost by what we saw: the scheduler hears it now, the pages stay until prefill has drained."""
        if state.over:
            return
        self._shared.counters.failures += 1
        self._shared.emit(DecodeFailed(state.generation, error))
        self._drain(state, error)

    def _drain(self, state: _Room, error: ApiError) -> None:
        state.over = True
        if state.link is not None:
            state.link.send(_ending(state.room, state.generation, error))
        if state.link is None or state.pages is None:  # no page was promised
            self._close(state, error)

    def _close(self, state: _Room, error: ApiError) -> None:
        """The last of a room; `error` matters if the scheduler has not heard of one."""
        if not state.over:
            state.over = True
            self._shared.counters.failures += 1
            self._shared.emit(DecodeFailed(state.generation, error))
        del self._rooms[state.generation]
        self._shared.emit(DecodeClosed(state.generation))

    # Time.

    def tick(self) -> None:
        """Once a tick: says `Queued` for every room, and ends those about which prefill is silent or whose transfer takes too long."""
        settings = self._shared.settings
        for state in list(self._rooms.values()):
            if state.link is None or state.over:
                continue
            state.link.send(Queued(room=state.room, generation=state.generation))
            state.silent_ticks += 1
            size = len(state.pages or ()) * self._shared.hello.page_bytes
            limit = settings.limit_s(tokens=state.prompt_tokens, size_bytes=size)
            if state.silent_ticks > MISSES:
                text = f"prefill worker {state.link.name} went silent about room {state.room}"
                self._fail(state, ApiError(503, text, type=errors.SERVER, code="transfer_failed"))
            elif state.first_page_at is not None and self._clock() - state.first_page_at > limit:
                text = f"the hand-over of room {state.room} was not done {limit:.0f} s after its first page (--transfer-timeout)"
                self._fail(state, ApiError(504, text, type=errors.TIMEOUT, code="transfer_timeout"))


def _ending(room: int, generation: int, error: ApiError) -> Abort | Failed:
    """How prefill hears that decode's leg is over."""
    if error.code == errors.CODE_ABORTED:
        return Abort(room=room, generation=generation, reason=error.message)
    return Failed(room=room, generation=generation, status=error.status, type=error.type, code=error.code, message=error.message)


def _derived(link: Link, message: Failed) -> ApiError:
    """Prefill's error as the decode leg reports it: prefill's own answer says it better, but a stale worker is the router's to handle."""
    keep = (errors.CODE_ABORTED, errors.CODE_STALE_WORKER)
    code = message.code if message.code in keep else errors.CODE_PEER_FAILED
    return ApiError(message.status, f"prefill worker {link.name}: {message.message}", type=message.type, code=code)


def _stale(bootstrap: str, found: str, wanted: str) -> ApiError:
    text = f"the prefill worker at {bootstrap} is incarnation {found}, not {wanted}: it was restarted"
    return ApiError(409, text, code=errors.CODE_STALE_WORKER)


def _gone(cause: str) -> ApiError:
    return ApiError(503, f"the prefill worker is gone: {cause}", type=errors.SERVER, code="transfer_failed")
