"""The router's unit of prefixes: a block of four pages. Imported by edges too, which load none of the index."""

from __future__ import annotations

from typing import Final

from fleet_contract.names import PAGE_SIZE

STRIDE: Final = 4  # pages per block
BLOCK_TOKENS: Final = STRIDE * PAGE_SIZE
