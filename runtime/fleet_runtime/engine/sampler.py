"""The next token of each row, from its logits: greedy, or temperature and top-p with seeded noise. Pure numpy; called by executors.

Noise is a function of (seed, position, token id) and of nothing else, so a row draws the same token alone, in any batch, and when it is
computed again. Drawing is Gumbel-max: argmax(logit / temperature + gumbel) has the softmax's distribution (Maddison et al., "A* Sampling",
section 2). Top-p keeps the least set of most likely tokens whose probability reaches p, the token that crosses included (Holtzman et
al., "The Curious Case of Neural Text Degeneration", section 3.1). Equal logits: the lowest id comes first.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from fleet_runtime.engine.base import F32, I32, U64, Bools

GREEDY_BELOW: Final = 1e-6  # lower temperatures are greedy
_FIRST_CANDIDATES: Final = 64  # tokens that top-p looks at first; four times more each time they are not enough
_LOW32: Final = 0xFFFFFFFF
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the increment of SplitMix64

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def sample(logits: F32, temperature: F32, top_p: F32, seed: U64, positions: I32) -> tuple[I32, Bools]:
    """The tokens of N rows.

    Args: logits: [N, vocab], -inf excludes a token. temperature, top_p, seed: [N]. positions: [N], of the token to draw.
    Returns (tokens [N], failed [N]): a row with NaN, +inf or nothing but -inf has failed and its token is 0.
    """
    tokens = np.zeros(len(logits), np.int32)
    failed = np.zeros(len(logits), np.bool_)
    for i, row in enumerate(logits):
        best = int(row.argmax())  # a NaN wins, the first of equals wins
        if not np.isfinite(row[best]):
            failed[i] = True
        elif temperature[i] < GREEDY_BELOW:
            tokens[i] = best
        else:
            tokens[i] = _draw(row, float(row[best]), float(temperature[i]), float(top_p[i]), int(seed[i]), int(positions[i]))
    return tokens, failed


def _draw(row: F32, highest: float, temperature: float, top_p: float, seed: int, position: int) -> int:
    scores = (row.astype(np.float64) - highest) / temperature
    ids = np.arange(len(row)) if top_p >= 1.0 else nucleus(scores, top_p)
    return int(ids[np.argmax(scores[ids] + gumbel(seed, position, ids))])


def nucleus(scores: F64, top_p: float) -> I64:
    """Ids of the top-p set, ascending. scores: [vocab] logits / temperature, at most 0, at least one is 0. top_p: in (0, 1).

    Looks at the most likely tokens only, as many as it takes.
    """
    weights = np.exp(scores)
    wanted = top_p * weights.sum()
    count = _FIRST_CANDIDATES
    while True:
        if count < len(scores):
            least = np.partition(scores, len(scores) - count)[len(scores) - count]
            ids = np.flatnonzero(scores >= least)  # all that are equal to the least one, or which is kept would be chance
        else:
            ids = np.arange(len(scores))
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        crossing = int(np.searchsorted(np.cumsum(weights[ids]), wanted, side="left"))
        if crossing < len(ids) or len(ids) == len(scores):  # rounding may leave the sum of all just under `wanted`
            return np.sort(ids[: crossing + 1])
        count *= 4


def gumbel(seed: int, position: int, ids: I64) -> F64:
    """Gumbel noise of each token id: a 32-bit hash under a 64-bit key of (seed, position). Finite: between -3.1 and 22.9."""
    key = _mix64(_mix64(seed + _GOLDEN) ^ (position * _GOLDEN))
    hashed = _mix32(ids.astype(np.uint32) ^ np.uint32(key & _LOW32))
    hashed = _mix32(hashed ^ np.uint32(key >> 32))
    uniform = (hashed.astype(np.float64) + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(uniform)))


def _mix64(x: int) -> int:
    """Finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", variant 13)."""
    x &= 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _mix32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Finalizer of MurmurHash3, 32 bits: each bit of the input turns each bit of the output half of the time."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
