"""Changes of a request's top-level JSON fields that leave the bytes of all others as the client sent them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode


def splice(fields: Mapping[str, msgspec.Raw], changes: Mapping[str, bytes | None]) -> bytes:
    """The JSON object of `fields`, with some values set or (None) left out.

    A field that the client gave twice is there once, with the last value: the one that routing has read.
    """
    out: list[bytes | msgspec.Raw] = []
    for name, raw in fields.items():
        new = changes.get(name, raw)
        if new is not None:
            out += (b"," if out else b"{", _encode(name), b":", new)
    for name, new in changes.items():
        if new is not None and name not in fields:
            out += (b"," if out else b"{", _encode(name), b":", new)
    return b"".join(out) + b"}" if out else b"{}"
