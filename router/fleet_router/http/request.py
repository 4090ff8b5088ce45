"""A client's request as `http_server` reads it, and the limits of reading it."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_contract.errors import ApiError
from fleet_router.http.head import Head


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the data port; each is a flag."""

    max_body_bytes: int
    max_head_bytes: int
    head_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: float
    write_timeout_s: float
    max_connections: int  # no flag: from the process's limit of open files
    max_held_bytes: int  # of bodies, all connections together


class Request:
    """One whole request."""

    def __init__(
        self, head: Head, keep_alive: bool, request_id: str, body: bytes = b"", held_bytes: int = 0, refused: ApiError | None = None,
    ) -> None:  # fmt: skip
        self.head = head
        self.keep_alive = keep_alive
        self.request_id = request_id
        self.body = body
        self.held_bytes = held_bytes  # of its body, while the budget counts them
        self.refused = refused  # by the protocol itself: answered in its turn, then the connection ends

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.head.headers

    def header(self, name: bytes) -> bytes | None:
        """First value of a header; the name in lower case."""
        return self.head.header(name)
