"""W3C trace context of a request (https://www.w3.org/TR/trace-context/): what of it goes to workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fleet_router.http.head import Head

MAX_STATE: Final = 512  # characters that have to be passed on
_HEX: Final = frozenset(b"0123456789abcdef")


def passed_on(head: Head) -> Sequence[tuple[str, str]]:
    """`traceparent`, and `tracestate` beside it. A traceparent that is none is dropped, and its state with it."""
    parent = head.header(b"traceparent")
    if parent is None or not is_parent(parent):
        return ()
    state = b",".join(v for n, v in head.headers if n == b"tracestate")
    if state and len(state) <= MAX_STATE and state.isascii():
        return (("traceparent", parent.decode()), ("tracestate", state.decode()))
    return (("traceparent", parent.decode()),)


def is_parent(value: bytes) -> bool:
    """`00-<32 hex>-<16 hex>-<2 hex>`, or a later version that begins so; no id is all zeros."""
    parts = value.split(b"-")
    if len(parts) < 4 or [len(p) for p in parts[:4]] != [2, 32, 16, 2] or not _HEX.issuperset(b"".join(parts[:4])):
        return False
    if parts[0] == b"ff" or (parts[0] == b"00" and len(parts) > 4) or len(value) > 200:
        return False
    return parts[1].strip(b"0") != b"" and parts[2].strip(b"0") != b""
