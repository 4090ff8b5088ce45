"""The router's unit of prefixes: a block of four pages; of a prompt without token ids, a block of bytes. Imported by edges too, which load
none of the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fleet_contract.names import PAGE_SIZE

STRIDE: Final = 4  # pages per block
BLOCK_TOKENS: Final = STRIDE * PAGE_SIZE
TOKENS, BYTES, NONE = MADE_OF = ("tokens", "bytes", "none")


def made_of(keys: Sequence[int], key_tokens: float) -> str:
    """One of MADE_OF; none: the prompt is shorter than a block, or cannot be read. Args: key_tokens: 0 for keys of tokens."""
    if not keys:
        return NONE
    return BYTES if key_tokens else TOKENS
