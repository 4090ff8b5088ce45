"""The next token of each row, from its logits, as `Sampling` says. Pure numpy: the reference of all executors, and the torch one's own.

Order: logit bias (and -inf of what `min_tokens` forbids) -> repetition penalty -> frequency and presence penalties -> grammar mask -> logprobs
are taken here -> temperature -> top-k -> top-p of what is left, renormalised -> min-p -> draw. Each of them in float32 up to the logprobs,
in float64 after.

Noise is a function of (seed, position, token id) and of nothing else, so a row draws the same token alone, in any batch, and when it is
computed again. Drawing is Gumbel-max: argmax(logit / temperature + gumbel) has the softmax's distribution (Maddison et al., "A* Sampling",
section 2). Top-p keeps the least set of most likely tokens whose probability reaches p, the token that crosses included (Holtzman et
al., "The Curious Case of Neural Text Degeneration", section 3.1). Min-p keeps tokens at least min_p times as likely as the most likely one
(Nguyen et al., "Turning Up the Heat: Min-p Sampling", section 3). Repetition divides positive logits and multiplies negative ones (Keskar et
al., "CTRL", section 4.1). The most likely token stays whatever the limits say. Equal logits: the lowest id comes first.

A logprob of a token that cannot be drawn is minus infinity and JSON has none: it is reported as LOWEST_LOGPROB, and so is all below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from fleet_runtime.engine.base import F32, I32, Bools, Sampling, TopLogprobs

GREEDY_BELOW: Final = 1e-6  # lower temperatures are greedy
LOWEST_LOGPROB: Final = -9999.0
_FIRST_CANDIDATES: Final = 64  # tokens that top-p looks at first; four times more each time they are not enough
_LOW32: Final = 0xFFFFFFFF
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the increment of SplitMix64

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Drawn:
    """tokens: [S] int32, 0 where `failed`. logprobs: by row number, of rows that want them and have not failed."""

    tokens: I32
    failed: Bools
    logprobs: dict[int, TopLogprobs] = field(default_factory=dict)


def sample(logits: F32, sampling: Sampling, positions: I32) -> Drawn:
    """The tokens of S rows.

    Args: logits: [S, vocab], -inf excludes a token; not changed. positions: [S], of the token to draw.
    A row with NaN or +inf, or with nothing that may be drawn, has failed, and no other.
    """
    out = Drawn(np.zeros(len(logits), np.int32), np.zeros(len(logits), np.bool_))
    for s, raw in enumerate(logits):
        if not raw.max() < np.inf:  # NaN, too; before a mask can hide it
            out.failed[s] = True
            continue
        row = adjusted(raw, sampling, s)
        best = int(row.argmax())  # a NaN wins, the first of equals wins
        if not np.isfinite(row[best]):
            out.failed[s] = True
            continue
        out.tokens[s] = token = _draw(row, sampling, s, int(positions[s])) if sampling.temperature[s] >= GREEDY_BELOW else best
        if sampling.logprobs is not None and sampling.logprobs[s] >= 0:
            out.logprobs[s] = top_logprobs(row[None], np.array([token], np.int32), int(sampling.logprobs[s]))
    return out


def adjusted(row: F32, sampling: Sampling, s: int) -> F32:
    """The logits of row s after bias, penalties and mask: what logprobs are of. `row` itself where nothing is asked for, else a copy."""
    out = row
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows fails its row, see `sample`
        if sampling.bias_starts is not None and sampling.bias_ids is not None and sampling.bias_values is not None:
            at = slice(sampling.bias_starts[s], sampling.bias_starts[s + 1])
            if at.start < at.stop:
                out = out.copy()
                ids, values = sampling.bias_ids[at], sampling.bias_values[at]
                known = (ids >= 0) & (ids < len(row))
                np.add.at(out, ids[known], values[known])
        if sampling.count_starts is not None and sampling.count_ids is not None and sampling.counts is not None:
            at = slice(sampling.count_starts[s], sampling.count_starts[s + 1])
            if at.start < at.stop:
                out = out.copy() if out is row else out
                _penalize(out, sampling.count_ids[at], sampling.counts[at], sampling, s)
    if sampling.masks is not None and sampling.mask_rows is not None and sampling.mask_rows[s] >= 0:
        out = np.where(allowed(sampling.masks[sampling.mask_rows[s]], len(row)), out, np.float32(-np.inf))
    return out


def _penalize(row: F32, ids: I32, counts: I32, sampling: Sampling, s: int) -> None:
    """counts: in the answer; 0 for ids of the prompt only, which only the repetition penalty looks at."""
    values = row[ids]
    if sampling.repetition is not None:
        values = np.where(values > 0, values / sampling.repetition[s], values * sampling.repetition[s])
    if sampling.frequency is not None:
        values = values - sampling.frequency[s] * counts.astype(np.float32)
    if sampling.presence is not None:
        values = values - sampling.presence[s] * (counts > 0).astype(np.float32)
    row[ids] = values


def allowed(mask: npt.NDArray[np.uint32], vocab: int) -> Bools:
    """[vocab] bool from bits: bit i % 32 of word i // 32. Ids beyond the mask are not allowed."""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), bitorder="little")[:vocab].astype(np.bool_)
    return bits if len(bits) == vocab else np.concatenate((bits, np.zeros(vocab - len(bits), np.bool_)))


def top_logprobs(logits: F32, chosen: I32, k: int) -> TopLogprobs:
    """Of n places: the logprob of a token, and the k most likely. logits: [n, vocab]; chosen: [n]; k: cut to the vocabulary."""
    k = min(k, logits.shape[1])
    ids, values = np.zeros((len(logits), k), np.int32), np.zeros((len(logits), k), np.float32)
    of_chosen = np.zeros(len(logits), np.float32)
    for i, row in enumerate(logits):
        highest = float(row.max())
        norm = highest + float(np.log(np.exp(row.astype(np.float64) - highest).sum()))
        ids[i] = most_likely(row, k)
        values[i], of_chosen[i] = row[ids[i]] - norm, row[chosen[i]] - norm
    return TopLogprobs(np.maximum(of_chosen, LOWEST_LOGPROB), ids, np.maximum(values, LOWEST_LOGPROB))


def joined(pieces: Sequence[TopLogprobs], k: int) -> TopLogprobs:
    """Several places' logprobs as one; k: their width where there are none."""
    if not pieces:
        return TopLogprobs(np.zeros(0, np.float32), np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
    return TopLogprobs(*(np.concatenate([getattr(p, name) for p in pieces]) for name in ("chosen", "ids", "values")))


def most_likely(scores: npt.NDArray[np.floating], k: int) -> I64:
    """The k ids of the highest scores, highest first, ties to the lowest id. Does not sort the vocabulary."""
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k] if k else np.inf
        ids = np.flatnonzero(scores >= least)  # all that are equal to the least one, or which is kept would be chance
    else:
        ids = np.arange(len(scores))
    return ids[np.argsort(-scores[ids], kind="stable")][:k]


def _draw(row: F32, sampling: Sampling, s: int, position: int) -> int:
    """A token of a row whose highest logit is finite."""
    scores = (row.astype(np.float64) - float(row.max())) / float(sampling.temperature[s])
    ids = kept(scores, top_k=int(sampling.top_k[s]), top_p=float(sampling.top_p[s]), min_p=float(sampling.min_p[s]))
    return int(ids[np.argmax(scores[ids] + gumbel(int(sampling.seed[s]), position, ids))])


def kept(scores: F64, *, top_k: int, top_p: float, min_p: float) -> I64:
    """Ids that may be drawn, ascending; never none. scores: [vocab] logits / temperature, the highest is 0."""
    ids = np.sort(most_likely(scores, top_k)) if 0 < top_k < len(scores) else np.arange(len(scores))
    if top_p < 1.0:
        ids = ids[nucleus(scores[ids], top_p)]
    if min_p > 0.0:
        ids = ids[np.exp(scores[ids]) >= min(min_p, 1.0)]
    return ids


def nucleus(scores: F64, top_p: float) -> I64:
    """Indices of the top-p set, ascending. scores: at most 0, at least one is 0. top_p: below 1.

    Looks at the most likely tokens only, as many as it takes.
    """
    weights = np.exp(scores)
    wanted = top_p * weights.sum()
    count = _FIRST_CANDIDATES
    while True:
        ids = most_likely(scores, count)
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
