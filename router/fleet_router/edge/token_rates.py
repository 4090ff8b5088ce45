"""Tokens per byte of prompts that are not tokenised here, by model revision: learned from what workers count. Pure; one owner."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fleet_router.api.body import TOKENS_PER_BYTE

PRIOR_BYTES: Final = 4 << 10  # what the first guess weighs
MEMORY_BYTES: Final = 1 << 20  # of prompts; what is older weighs less and less
MIN_TOKENS_PER_BYTE: Final = 1 / 32
MAX_TOKENS_PER_BYTE: Final = 2.0  # a token for each byte, and what templates add
MAX_MODELS: Final = 1024


class TokenRates:
    """See the module. An edge learns from its own requests."""

    def __init__(self) -> None:
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()  # model revision -> tokens, bytes

    def get(self, model_revision: str) -> float:
        """Tokens per byte, as far as known."""
        tokens, size = self._sums.get(model_revision, (TOKENS_PER_BYTE, 1.0))
        return tokens / size

    def learn(self, model_revision: str, size_bytes: int, tokens: int) -> None:
        """A worker counted a prompt of so many bytes. What cannot be is bounded, so that one worker's nonsense does not last."""
        if size_bytes <= 0 or tokens <= 0:
            return
        told = min(max(tokens, size_bytes * MIN_TOKENS_PER_BYTE), size_bytes * MAX_TOKENS_PER_BYTE)
        known, size = self._sums.pop(model_revision, (TOKENS_PER_BYTE * PRIOR_BYTES, float(PRIOR_BYTES)))
        keep = min(1.0, MEMORY_BYTES / (size + size_bytes))
        self._sums[model_revision] = (known * keep + told, size * keep + size_bytes)
        if len(self._sums) > MAX_MODELS:
            self._sums.popitem(last=False)
