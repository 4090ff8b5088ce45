"""Router -> runtime request bytes. Format: docs/contract.md section 4."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence

from msgspec import Struct

from fleet_contract import names


class WireError(ValueError):
    """Bytes that break the contract; the message says what is wrong."""


def encode_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    a = array.array("I", ids)
    if sys.byteorder == "big":
        a.byteswap()
    return a.tobytes()


def decode_ids(data: bytes) -> list[int]:
    """Inverse of `encode_ids`. Raises WireError when the length is no multiple of 4."""
    if len(data) % 4:
        raise WireError(f"token ids take 4 bytes each, but {len(data)} bytes follow the JSON")
    a = array.array("I", data)
    if sys.byteorder == "big":
        a.byteswap()
    return a.tolist()


def split_ids_body(json_length: int, body: bytes) -> tuple[bytes, list[int]]:
    """Splits a `CONTENT_TYPE_IDS` body into the client's JSON and the ids. Raises WireError on wrong lengths."""
    if not 0 <= json_length <= len(body):
        raise WireError(f"{names.HEADER_JSON_LENGTH} is {json_length}, but the body has {len(body)} bytes")
    return body[:json_length], decode_ids(body[json_length:])


def _pick_text(pick_id: str, number: int) -> str:
    """A pick in a header."""
    return f"{pick_id}:{number}"


def routed_alone(rid: str, pick_id: str, number: int, deadline_ms: int) -> list[tuple[str, str]]:
    """`RoutedHeaders.items` of a request that one worker serves alone, without the structure: it is on every request's way."""
    return [(names.HEADER_RID, rid), (names.HEADER_PICK, _pick_text(pick_id, number)), (names.HEADER_DEADLINE_MS, str(deadline_ms))]


class RoutedHeaders(Struct, frozen=True):
    """The headers a router adds to a request, parsed. Everything is None or empty for a request that no router sent."""

    rid: str | None = None
    pick: tuple[str, int] | None = None  # router id, number
    deadline_ms: int | None = None
    leg: str | None = None  # prefill | decode
    rooms: tuple[int, ...] = ()
    bootstrap: str | None = None
    prefill_incarnation: str | None = None

    def items(self) -> list[tuple[str, str]]:
        """Header lines, in a fixed order."""
        out: list[tuple[str, str]] = []
        if self.rid is not None:
            out.append((names.HEADER_RID, self.rid))
        if self.pick is not None:
            out.append((names.HEADER_PICK, _pick_text(*self.pick)))
        if self.deadline_ms is not None:
            out.append((names.HEADER_DEADLINE_MS, str(self.deadline_ms)))
        if self.leg is not None:
            out.append((names.HEADER_LEG, self.leg))
        out.extend((names.HEADER_ROOM, str(room)) for room in self.rooms)
        if self.bootstrap is not None:
            out.append((names.HEADER_BOOTSTRAP, self.bootstrap))
        if self.prefill_incarnation is not None:
            out.append((names.HEADER_PREFILL_INCARNATION, self.prefill_incarnation))
        return out


def parse_routed_headers(headers: Sequence[tuple[str, str]]) -> RoutedHeaders:
    """Parses the router's headers (names in any case). Raises WireError with the header and what is allowed."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name.lower(), []).append(value.strip())

    def one(name: str) -> str | None:
        values = found.get(name.lower(), [])
        if len(values) > 1:
            raise WireError(f"header {name} is given {len(values)} times; send it once")
        return values[0] if values else None

    def number(name: str, text: str, limit: int) -> int:
        if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= limit:
            raise WireError(f"header {name} is {text[:40]!r}; a decimal number below {limit} is allowed")
        return int(text)

    def hexadecimal(name: str, digits: int) -> str | None:
        text = one(name)
        if text is not None and (len(text) != digits or any(c not in "0123456789abcdef" for c in text)):
            raise WireError(f"header {name} is {text[:40]!r}; {digits} lower-case hex digits are allowed")
        return text

    pick: tuple[str, int] | None = None
    if (text := one(names.HEADER_PICK)) is not None:
        router_id, _, n = text.rpartition(":")
        if not router_id:
            raise WireError(f"header {names.HEADER_PICK} is {text[:40]!r}; <routerId>:<n> is allowed")
        pick = (router_id, number(names.HEADER_PICK, n, 2**63))
    deadline = one(names.HEADER_DEADLINE_MS)
    leg = one(names.HEADER_LEG)
    if leg not in (None, "prefill", "decode"):
        raise WireError(f"header {names.HEADER_LEG} is {leg!r}; prefill or decode is allowed")
    rooms = tuple(number(names.HEADER_ROOM, text, 2**63) for text in found.get(names.HEADER_ROOM.lower(), []))
    bootstrap = one(names.HEADER_BOOTSTRAP)
    if bootstrap is not None:
        host, _, port = bootstrap.rpartition(":")
        if not host:
            raise WireError(f"header {names.HEADER_BOOTSTRAP} is {bootstrap[:60]!r}; host:port is allowed")
        number(names.HEADER_BOOTSTRAP, port, 65536)
    if leg is not None and not rooms:
        raise WireError(f"header {names.HEADER_LEG} needs {names.HEADER_ROOM}")
    if leg == "decode" and bootstrap is None:
        raise WireError(f"a decode leg needs {names.HEADER_BOOTSTRAP}")
    return RoutedHeaders(
        rid=hexadecimal(names.HEADER_RID, 32),
        pick=pick,
        deadline_ms=None if deadline is None else number(names.HEADER_DEADLINE_MS, deadline, 2**53),
        leg=leg,
        rooms=rooms,
        bootstrap=bootstrap,
        prefill_incarnation=hexadecimal(names.HEADER_PREFILL_INCARNATION, 16),
    )
