"""Identifiers of requests: the clients' own, or random ones out of a store of random bytes: one system call for many. One event loop per
process uses it."""

from __future__ import annotations

import os
from typing import Final

STORE_BYTES: Final = 4096
MAX_REQUEST_ID: Final = 128
_REQUEST_ID_CHARS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
_store, _at = b"", 0


def make_request_id(given: bytes | None) -> str:
    """The client's X-Request-Id when it is sane, else a new one."""
    if given and len(given) <= MAX_REQUEST_ID and _REQUEST_ID_CHARS.issuperset(given):
        return given.decode("ascii")
    return "req-" + random_hex(12)


def random_hex(size: int) -> str:
    """As `secrets.token_hex`: so many bytes of the system's randomness, each used once."""
    global _store, _at
    if _at + size > len(_store):
        _store, _at = os.urandom(max(STORE_BYTES, size)), 0
    end = _at + size
    out = _store[_at:end].hex()
    _at = end
    return out
