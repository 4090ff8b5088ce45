"""The seam between scheduler and hand-over: rooms, commands and events. Protocol: docs/contract.md section 9.

The scheduler calls commands from its loop; they return at once. An I/O thread does the work, so that a long step does not look like death,
and answers with events that `poll` hands over. A prefill leg is named by its room, a decode leg by the generation that it minted.

Page ownership: from `expect` or `dial` on, the transfer may touch the pages given to it until the room's one final event
(`PrefillReceived`, `PrefillClosed`, `DecodeComplete`, `DecodeClosed`). The scheduler frees them only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet_contract.errors import ApiError
from fleet_contract.handoff import Done


@dataclass(frozen=True, slots=True)
class PrefillAllocated:
    """Decode has reserved its pages: the prompt may be computed. It holds the first `prefix_pages` itself."""

    room: int
    prefix_pages: int
    pages: int


@dataclass(frozen=True, slots=True)
class PrefillReceived:
    """Final: decode has everything."""

    room: int


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The room is lost; `PrefillClosed` follows."""

    room: int
    error: ApiError


@dataclass(frozen=True, slots=True)
class PrefillClosed:
    """Final: no page of this room will be read any more."""

    room: int


@dataclass(frozen=True, slots=True)
class DecodeOpen:
    """The prefill worker is connected and fits."""

    generation: int


@dataclass(frozen=True, slots=True)
class DecodeComplete:
    """Final: every page is written and checked."""

    generation: int
    done: Done


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The room is lost; `DecodeClosed` follows when no write can come any more."""

    generation: int
    error: ApiError


@dataclass(frozen=True, slots=True)
class DecodeClosed:
    """Final: no page of this room will be written any more."""

    generation: int


Event = PrefillAllocated | PrefillReceived | PrefillFailed | PrefillClosed | DecodeOpen | DecodeComplete | DecodeFailed | DecodeClosed


class PageAccess(Protocol):
    """What a transfer needs of an executor; called from the I/O thread, for pages that the scheduler has set aside."""

    def read_page(self, page: int) -> bytes: ...

    def write_page(self, page: int, data: bytes | memoryview) -> None: ...


@dataclass(slots=True)
class TransferCounters:
    """Since the start of the process; written by the I/O thread, read by the scheduler."""

    rooms: int = 0
    failures: int = 0
    pages: int = 0
    bytes: int = 0
    checksum_failures: int = 0
    late_messages: int = 0


class KvTransfer(Protocol):
    """One backend. All commands are idempotent for a room that has had its final event: nothing happens."""

    @property
    def counters(self) -> TransferCounters: ...

    def poll(self) -> list[Event]:
        """Events since the last call, in order."""
        ...

    def beat(self) -> None:
        """Called once per scheduler loop: peers see its progress in pings."""
        ...

    # Prefill side.
    def expect(self, room: int) -> None:
        """The prefill leg of a room is here."""
        ...

    def send_pages(self, room: int, first: int, pages: Sequence[int]) -> None:
        """Pages `first`, `first + 1`, … of `Alloc.pages` are computed; here are ours that hold them."""
        ...

    def send_done(self, room: int, done: Done) -> None:
        """All pages were given to `send_pages`; room and generation of `done` are filled in here."""
        ...

    def cancel(self, room: int, error: ApiError) -> None:
        """The prefill leg is over; decode is told why. `PrefillClosed` follows."""
        ...

    # Decode side.
    def dial(self, generation: int, room: int, bootstrap: str, incarnation: str) -> None:
        """Connects a room to its prefill worker (`host:port` of its bootstrap server), which must be of this incarnation."""
        ...

    def alloc(self, generation: int, prefix_pages: int, pages: Sequence[int], prompt_tokens: int) -> None:
        """Promises pages to the prefill worker."""
        ...

    def abandon(self, generation: int, error: ApiError) -> None:
        """The decode leg is over; prefill is told why. `DecodeClosed` follows when it has drained, or is gone."""
        ...

    def reject(self, room: int, leg: str, bootstrap: str, incarnation: str, error: ApiError) -> None:
        """A leg was refused before it reached the scheduler: remember that, and tell the peer so that it does not wait."""
        ...
