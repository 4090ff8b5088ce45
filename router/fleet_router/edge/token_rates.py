"""Tokens per byte of prompts that are not tokenised here, by model revision: learned from what workers count. Pure; one owner."""

from __future__ import annotations

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
        self._sums: dict[str, list[float]] = {}  # model revision -> tokens, bytes

    def get(self, model_revision: str) -> float:
        """Tokens per byte, as far as known."""
        sums = self._sums.get(model_revision)
        return sums[0] / sums[1] if sums is not None else TOKENS_PER_BYTE

    def learn(self, model_revision: str, size_bytes: int, tokens: int) -> None:
        """A worker counted a prompt of so many bytes. What cannot be is bounded, so that one worker's nonsense does not last."""
        if size_bytes <= 0 or tokens <= 0:
            return
        sums = self._sums.get(model_revision)
        if sums is None:
            if len(self._sums) >= MAX_MODELS:
                del self._sums[next(iter(self._sums))]
            sums = self._sums[model_revision] = [TOKENS_PER_BYTE * PRIOR_BYTES, float(PRIOR_BYTES)]
        sums[0] += min(max(tokens, size_bytes * MIN_TOKENS_PER_BYTE), size_bytes * MAX_TOKENS_PER_BYTE)
        sums[1] += size_bytes
        if sums[1] > MEMORY_BYTES:
            keep = MEMORY_BYTES / sums[1]
            sums[0] *= keep
            sums[1] *= keep
