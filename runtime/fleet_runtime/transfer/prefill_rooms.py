"""The prefill end of all rooms: who waits for whom, what was sent, what is over. Runs on the I/O thread; called by `tcp` and by links.

A room exists from the first sign of either leg: the prefill leg (`expect`) or decode's first message. What ended leaves a tombstone, so
that the other leg, should it come late, is answered at once.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fleet_contract import errors, handoff
from fleet_contract.errors import ApiError
from fleet_contract.handoff import Abort, Alloc, Done, Drained, Failed, Handoff, Pages, Queued, Received
from fleet_runtime.transfer.base import PrefillAllocated, PrefillClosed, PrefillFailed, PrefillReceived
from fleet_runtime.transfer.link import MISSES, Link, Shared, Sink

TOMBSTONE_S: Final = 60.0
MAX_TOMBSTONES: Final = 10_000
FRAME_PAYLOAD_BYTES: Final = 4 << 20


@dataclass(slots=True, eq=False)
class _Room:
    room: int
    link: Link | None = None  # decode's connection, from its first message on
    generation: int = 0
    expected: bool = False  # the prefill leg is here, and its scheduler waits for our final event
    alloc: Alloc | None = None
    silent_ticks: int = 0  # of decode on this room, or of the leg that has not come
    started: float | None = None  # first page given to us
    size_bytes: int = 0
    over: bool = False
    done_sent: bool = False


@dataclass(slots=True)
class Tombstones:
    """Rooms that are over, for a while: with the error that a late leg gets, or None if they ended well."""

    clock: Callable[[], float]
    _rooms: OrderedDict[int, tuple[float, ApiError | None]] = field(default_factory=OrderedDict)

    def put(self, room: int, error: ApiError | None) -> None:
        """Remembers a room for TOMBSTONE_S, the last MAX_TOMBSTONES of them."""
        now = self.clock()
        while self._rooms and (len(self._rooms) >= MAX_TOMBSTONES or next(iter(self._rooms.values()))[0] < now):
            self._rooms.popitem(last=False)
        self._rooms[room] = (now + TOMBSTONE_S, error)
        self._rooms.move_to_end(room)

    def get(self, room: int) -> tuple[bool, ApiError | None]:
        """Whether the room is over, and its error."""
        until, error = self._rooms.get(room, (0.0, None))
        return until >= self.clock(), error

    def __len__(self) -> int:
        return len(self._rooms)


class PrefillRooms:
    """See the module. Implements link.Handler for connections that decode workers opened."""

    def __init__(self, shared: Shared, clock: Callable[[], float]) -> None:
        self.links: set[Link] = set()
        self.tombstones = Tombstones(clock)
        self._shared = shared
        self._clock = clock
        self._rooms: dict[int, _Room] = {}

    # Commands of the scheduler.

    def expect(self, room: int) -> None:
        """See KvTransfer."""
        is_over, error = self.tombstones.get(room)
        if is_over:
            late = error or ApiError(409, f"room {room} was used before; the router mints a new room for each pair", code="room_in_use")
            self._shared.emit(PrefillFailed(room, late))
            self._shared.emit(PrefillClosed(room))
            return
        state = self._rooms.setdefault(room, _Room(room))
        state.expected, state.silent_ticks = True, 0
        self._announce(state)

    def send_pages(self, room: int, first: int, pages: Sequence[int]) -> None:
        """See KvTransfer."""
        state = self._rooms.get(room)
        if state is None or state.link is None:
            return
        if state.started is None:
            state.started = self._clock()
        page_bytes = self._shared.hello.page_bytes
        state.size_bytes += len(pages) * page_bytes
        if self._shared.settings.hold:
            return
        per_frame = max(1, FRAME_PAYLOAD_BYTES // page_bytes)
        for at in range(0, len(pages), per_frame):
            part = list(pages[at : at + per_frame])
            state.link.send_bulk(lambda state=state, begin=first + at, part=part: self._page_frame(state, begin, part))  # type: ignore[misc]

    def _page_frame(self, state: _Room, first: int, pages: list[int]) -> bytes | None:
        if state.over:
            return None
        data = [self._shared.pages.read_page(page) for page in pages]
        message = Pages(room=state.room, generation=state.generation, first=first, count=len(pages), crc=[zlib.crc32(page) for page in data])
        payload = b"".join(data)
        self._shared.counters.pages += len(pages)
        self._shared.counters.bytes += len(payload)
        return handoff.encode(message, len(payload)) + payload

    def send_done(self, room: int, done: Done) -> None:
        """See KvTransfer."""
        state = self._rooms.get(room)
        if state is None or state.link is None or self._shared.settings.hold:
            return
        message = msgspec.structs.replace(done, room=room, generation=state.generation)

        def make() -> bytes | None:
            if state.over:
                return None
            state.done_sent = True
            return handoff.encode(message)

        state.link.send_bulk(make)

    def cancel(self, room: int, error: ApiError) -> None:
        """See KvTransfer. Pages are read only while a frame is made, on this thread: none is being read now."""
        state = self._rooms.get(room)
        if state is None or not state.expected:
            return
        self._tell(state, error)
        self._close(state, error)

    def reject(self, room: int, error: ApiError) -> None:
        """A prefill leg that was refused."""
        state = self._rooms.get(room)
        if state is not None and not state.expected:
            self._tell(state, error)
            self._close(state, error)
        elif state is None:
            self.tombstones.put(room, error)

    # Messages of decode.

    def on_message(self, link: Link, message: Handoff) -> None:
        """See link.Handler."""
        match message:
            case Queued() | Alloc():
                self._contact(link, message)
            case Received():
                state = self._bound(link, message.room, message.generation)
                if state is not None and state.done_sent:
                    self._shared.counters.rooms += 1
                    self._shared.emit(PrefillReceived(state.room))
                    self._forget(state, None)
            case Abort():
                self._peer_ended(link, message, ApiError(499, message.reason or "decode's request was aborted", code=errors.CODE_ABORTED))
            case Failed():
                text = f"decode worker {link.name}: {message.message}"
                self._peer_ended(link, message, ApiError(message.status, text, type=message.type, code=errors.CODE_PEER_FAILED))
            case _:
                self._shared.counters.late_messages += 1

    def on_pages(self, link: Link, message: Pages) -> Sink | None:
        """Decode sends no pages."""
        self._shared.counters.late_messages += 1
        return None

    def on_pages_end(self, link: Link, message: Pages) -> None:
        """Decode sends no pages."""

    def on_closed(self, link: Link, cause: str) -> None:
        """The decode worker is gone, or unreachable: its rooms end."""
        self.links.discard(link)
        error = ApiError(503, f"the decode worker is gone: {cause}", type=errors.SERVER, code="transfer_failed")
        for state in [s for s in self._rooms.values() if s.link is link]:
            self._fail(state, error)

    def _contact(self, link: Link, message: Queued | Alloc) -> None:
        state = self._rooms.get(message.room)
        if state is None:
            is_over, error = self.tombstones.get(message.room)
            if is_over:
                if error is None:
                    self._shared.counters.late_messages += 1
                else:
                    link.send(_failed(message.room, message.generation, error))
                return
            state = self._rooms[message.room] = _Room(message.room)
        if state.link is None:
            state.link, state.generation, state.silent_ticks = link, message.generation, 0
        elif (state.link, state.generation) != (link, message.generation):
            self._shared.counters.late_messages += 1
            if link is not state.link or message.generation > state.generation:
                error = ApiError(409, f"room {message.room} is in use by another decode leg", code="room_in_use")
                link.send(_failed(message.room, message.generation, error))
            return
        if state.expected:
            state.silent_ticks = 0
        if isinstance(message, Alloc) and state.alloc is None:
            mine = self._shared.hello.incarnation
            if message.prefill_incarnation not in ("", mine):
                stale = ApiError(409, f"this is incarnation {mine}, not {message.prefill_incarnation}", code=errors.CODE_STALE_WORKER)
                self._tell(state, stale)
                self._fail(state, stale)
                return
            state.alloc = message
            self._announce(state)

    def _announce(self, state: _Room) -> None:
        if state.expected and state.alloc is not None:
            self._shared.emit(PrefillAllocated(state.room, state.alloc.prefix_pages, len(state.alloc.pages)))

    def _bound(self, link: Link, room: int, generation: int) -> _Room | None:
        state = self._rooms.get(room)
        if state is None or state.link is not link or state.generation != generation:
            self._shared.counters.late_messages += 1
            return None
        return state

    def _peer_ended(self, link: Link, message: Abort | Failed, error: ApiError) -> None:
        """Decode's leg is over: so is ours. The answer says that no page will follow."""
        state = self._rooms.get(message.room)
        if state is None:
            if not self.tombstones.get(message.room)[0]:
                self.tombstones.put(message.room, error)
        elif state.link is None or (state.link is link and state.generation == message.generation):
            self._fail(state, error)
        else:
            self._shared.counters.late_messages += 1
        link.send(Drained(room=message.room, generation=message.generation))

    # Ends.

    def _tell(self, state: _Room, error: ApiError) -> None:
        if state.link is not None:
            state.link.send(_failed(state.room, state.generation, error))

    def _fail(self, state: _Room, error: ApiError) -> None:
        """A room is lost, and not by its own scheduler's word."""
        if state.expected:
            self._shared.counters.failures += 1
            self._shared.emit(PrefillFailed(state.room, error))
        self._close(state, error)

    def _close(self, state: _Room, error: ApiError) -> None:
        if state.expected:
            self._shared.emit(PrefillClosed(state.room))
        self._forget(state, error)

    def _forget(self, state: _Room, error: ApiError | None) -> None:
        state.over = True
        del self._rooms[state.room]
        self.tombstones.put(state.room, error)

    # Time.

    def tick(self) -> None:
        """Once a tick: says `Queued` for every room, and ends those whose other leg is silent or whose transfer takes too long."""
        settings = self._shared.settings
        patience = max(MISSES, round(settings.other_leg_s / settings.tick_s))
        for state in list(self._rooms.values()):
            state.silent_ticks += 1
            if state.link is not None:
                state.link.send(Queued(room=state.room, generation=state.generation))
            if (error := self._overdue(state, patience)) is not None:
                self._tell(state, error)
                self._fail(state, error)

    def _overdue(self, state: _Room, patience: int) -> ApiError | None:
        settings = self._shared.settings
        if state.link is None or not state.expected:
            if state.silent_ticks <= patience:
                return None
            missing = "decode" if state.link is None else "prefill"
            text = f"the {missing} leg of room {state.room} did not come within {settings.other_leg_s:g} s"
            return ApiError(503, text, type=errors.SERVER, code=errors.CODE_PEER_FAILED)
        if state.silent_ticks > MISSES:
            text = f"decode worker {state.link.name} went silent about room {state.room}"
            return ApiError(503, text, type=errors.SERVER, code=errors.CODE_PEER_FAILED)
        if state.started is not None:
            limit = settings.limit_s(tokens=16 * (state.size_bytes // max(1, self._shared.hello.page_bytes)), size_bytes=state.size_bytes)
            if self._clock() - state.started > limit:
                text = f"the hand-over of room {state.room} was not done {limit:.0f} s after its first page (--transfer-timeout)"
                return ApiError(504, text, type=errors.TIMEOUT, code="transfer_timeout")
        return None


def _failed(room: int, generation: int, error: ApiError) -> Failed:
    return Failed(room=room, generation=generation, status=error.status, type=error.type, code=error.code, message=error.message)
