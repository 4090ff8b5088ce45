"""Random identifiers for requests, out of a store of random bytes: one system call for many of them. One event loop per process uses it."""

from __future__ import annotations

import os
from typing import Final

STORE_BYTES: Final = 4096
_store, _at = b"", 0


def random_hex(size: int) -> str:
    """As `secrets.token_hex`: so many bytes of the system's randomness, each used once."""
    global _store, _at
    if _at + size > len(_store):
        _store, _at = os.urandom(max(STORE_BYTES, size)), 0
    end = _at + size
    out = _store[_at:end].hex()
    _at = end
    return out
