"""One budget for the bytes of request bodies that an edge holds: those that come in, and those whose answer has not begun.

Over the budget nobody is read from in the middle of a body: they wait with their sockets full, which slows their clients down, until
requests that are whole are answered. When there is none of these the body that began first gets on, so that there is always something that
does. A request that comes whole meanwhile is refused. So what is held stays below the budget, one body, and a piece of each connection
that was in the middle when it was reached. Pure; one event loop owns it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from fleet_contract import errors as contract_errors
from fleet_contract.errors import ApiError
from fleet_router.http.request import Request

PIECE: Final = 256 << 10  # what one reader may add before it is looked at again


class Reader(Protocol):
    """A connection in the middle of a body."""

    def stop_reading(self) -> None: ...

    def read_on(self) -> None: ...


class HeldBodies:
    """See the module. Readers are told at most once in a row."""

    def __init__(self, limit_bytes: int, on_limit: Callable[[str], None]) -> None:
        """`on_limit`: is told of each refusal."""
        self.limit_bytes = limit_bytes
        self._on_limit = on_limit
        self.size_bytes = 0
        self._whole_bytes = 0  # of them, of requests that are whole: these need no room to get on
        self._reading: dict[Reader, None] = {}  # in the middle of a body that came in pieces, the first first
        self._stopped: dict[Reader, None] = {}
        self._let_on: set[Reader] = set()  # have a piece of the room, and nothing came from them yet

    @property
    def is_over(self) -> bool:
        return self.size_bytes > self.limit_bytes

    def is_stopped(self, reader: Reader) -> bool:
        """It waits for room."""
        return reader in self._stopped

    def add(self, count: int) -> None:
        """So many bytes have come."""
        self.size_bytes += count

    def in_the_middle(self, reader: Reader) -> None:
        """Its body is not whole yet: it is read from on, or waits."""
        self._reading[reader] = None
        self._let_on.discard(reader)
        if self.is_over and reader not in self._stopped and not self._may_go_on(reader):
            self._stopped[reader] = None
            reader.stop_reading()
        self._let_some_on()

    def leave(self, reader: Reader) -> bool:
        """Its body is whole, or given up. False: it never was in the middle of one."""
        if reader not in self._reading:
            return False
        del self._reading[reader]
        self._let_on.discard(reader)
        if reader in self._stopped:
            del self._stopped[reader]
            reader.read_on()
        self._let_some_on()
        return True

    def hold(self, reader: Reader, request: Request) -> None:
        """Its whole body is here. One that came in pieces had its turn; one that came at once is refused when there is no room."""
        request.held_bytes = len(request.body)
        if not self.leave(reader) and request.body and self.is_over:
            request.refused = self.no_room()
            request.body = b""
            self.free(request.held_bytes)
            request.held_bytes = 0
        self._whole_bytes += request.held_bytes

    def let_go(self, request: Request) -> None:
        """The request's body is not needed any more."""
        held, request.held_bytes = request.held_bytes, 0
        self._whole_bytes -= held
        self.free(held)

    def free(self, count: int) -> None:
        """So many bytes are held no more."""
        if count:
            self.size_bytes -= count
            assert self.size_bytes >= 0
            self._let_some_on()

    def no_room(self) -> ApiError:
        """For a request that is refused."""
        self._on_limit("held_bytes")
        text = (
            f"this router holds {self.size_bytes} bytes of request bodies, and {self.limit_bytes} are allowed (--max-held-bytes); "
            "try again, or run more routers"
        )
        return ApiError(503, text, type=contract_errors.OVERLOADED, code="bodies_full", retry_after_s=1)

    def check_integrity(self) -> None:
        """Of a budget that nobody uses."""
        assert not self.size_bytes and not self._reading and not self._stopped, (self.size_bytes, len(self._reading), len(self._stopped))

    def _may_go_on(self, reader: Reader) -> bool:
        """Although there is no room."""
        return not self._whole_bytes and reader is next(iter(self._reading))

    def _let_some_on(self) -> None:
        """The one that began first, and more as far as there is room for a piece of each."""
        if not self._stopped:
            return
        first = next(iter(self._reading))
        if first in self._stopped and self._may_go_on(first):
            del self._stopped[first]
            first.read_on()
        while self._stopped and self.limit_bytes - self.size_bytes >= PIECE * (len(self._let_on) + 1):
            reader = next(iter(self._stopped))
            del self._stopped[reader]
            self._let_on.add(reader)
            reader.read_on()
