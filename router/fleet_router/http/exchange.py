"""Where the answer to one request goes, as whoever answers sees it; `server` has the one on a connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from fleet_contract.errors import ApiError
from fleet_router.http.request import Request

HeaderLines = tuple[tuple[bytes, bytes], ...]


class Exchange(ABC):
    """Where the answer to one request goes. All writes are dropped once the client is gone; `on_gone` tells it at once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started = False
        self.ended = False
        self.status = 0
        self.head_lines = b""  # of this answer, beside those that all have
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    @property
    def gone(self) -> bool:
        """Nobody reads what is written."""
        return False

    @property
    def paused(self) -> bool:
        """The client does not read as fast as is written."""
        return False

    @abstractmethod
    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: HeaderLines = ()) -> None:
        """A whole answer."""

    @abstractmethod
    def fail(self, error: ApiError) -> None:
        """An answer that is an error."""

    @abstractmethod
    def start_stream(self, content_type: bytes) -> None:
        """Head of a stream."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Bytes of a stream, unchanged."""

    @abstractmethod
    def finish(self) -> None:
        """The stream is complete."""

    @abstractmethod
    def cut(self) -> None:
        """The stream is not complete."""
