"""How rows draw: a request's options as the executor's `Sampling` arrays, and the counts that penalties look at. Called by the loop.

`min_tokens` is a bias of -inf on the stop ids while fewer tokens are drawn; a grammar is a mask (`scheduler.grammar`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fleet_runtime.engine.base import Sampling
from fleet_runtime.messages import Admit
from fleet_runtime.scheduler.batch import StepRow
from fleet_runtime.scheduler.request import Request

_SPARE: Final = 64
I32 = npt.NDArray[np.int32]


class TokenCounts:
    """The distinct tokens of one request's prompt and answer, and how often each is in the answer. Kept over retractions."""

    def __init__(self, prompt: I32) -> None:
        distinct = np.unique(prompt)
        self._ids = np.empty(len(distinct) + _SPARE, dtype=np.int32)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.int32)
        self._at = {token: i for i, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> I32:
        return self._ids[: len(self._at)]

    @property
    def counts(self) -> I32:
        return self._counts[: len(self._at)]

    def add(self, token: int) -> None:
        """The answer has one more token."""
        at = self._at.get(token)
        if at is None:
            at = self._at[token] = len(self._at)
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(at, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(at, np.int32)])
            self._ids[at] = token
        self._counts[at] += 1


def counts_for(admit: Admit, prompt: I32) -> TokenCounts | None:
    """The counts of a new request; None if no penalty looks at them."""
    if admit.repetition_penalty == 1.0 and admit.frequency_penalty == 0.0 and admit.presence_penalty == 0.0:
        return None
    return TokenCounts(prompt)


def sampling_of(draws: Sequence[StepRow], *, words: int = 0, fault: Callable[[Request, Exception], None] | None = None) -> Sampling:
    """How these rows draw.

    Args:
        words: 32-bit words of a grammar mask. fault: told of a request whose grammar failed; its row draws without a mask, and is ignored.
    """
    admits = [d.request.admit for d in draws]
    bias, counts, grammar, logprobs = False, False, False, False
    for draw in draws:
        request, admit = draw.request, draw.request.admit
        bias = bias or bool(admit.logit_bias) or admit.min_tokens > 0
        counts = counts or request.counts is not None
        grammar = grammar or request.grammar is not None
        logprobs = logprobs or admit.logprobs >= 0
    out = Sampling(
        temperature=np.array([a.temperature for a in admits], dtype=np.float32),
        top_k=np.array([a.top_k for a in admits], dtype=np.int32),
        top_p=np.array([a.top_p for a in admits], dtype=np.float32),
        min_p=np.array([a.min_p for a in admits], dtype=np.float32),
        seed=np.array([d.request.seed for d in draws], dtype=np.uint64),
    )
    if logprobs:
        out.logprobs = np.array([a.logprobs for a in admits], dtype=np.int32)
    if bias:
        _add_bias(out, draws)
    if counts:
        _add_counts(out, draws)
    if grammar:
        _add_masks(out, draws, words, fault)
    return out


def _add_bias(out: Sampling, draws: Sequence[StepRow]) -> None:
    starts, ids, values = [0], list[int](), list[float]()
    for draw in draws:
        request, admit = draw.request, draw.request.admit
        ids += admit.logit_bias.keys()
        values += admit.logit_bias.values()
        if draw.place - request.prompt_tokens < admit.min_tokens:
            ids += request.stop_ids
            values += [float("-inf")] * len(request.stop_ids)
        starts.append(len(ids))
    if ids:
        out.bias_starts = np.array(starts, dtype=np.int32)
        out.bias_ids = np.array(ids, dtype=np.int32)
        out.bias_values = np.array(values, dtype=np.float32)


def _add_counts(out: Sampling, draws: Sequence[StepRow]) -> None:
    starts, ids, counts = [0], list[I32](), list[I32]()
    for draw in draws:
        if (kept := draw.request.counts) is not None:
            ids.append(kept.ids)
            counts.append(kept.counts)
        starts.append(starts[-1] + (len(ids[-1]) if kept is not None else 0))
    admits = [d.request.admit for d in draws]
    out.count_starts = np.array(starts, dtype=np.int32)
    out.count_ids = np.concatenate(ids)  # copies: the counts go on while the step is computed
    out.counts = np.concatenate(counts)
    out.repetition = np.array([a.repetition_penalty for a in admits], dtype=np.float32)
    out.frequency = np.array([a.frequency_penalty for a in admits], dtype=np.float32)
    out.presence = np.array([a.presence_penalty for a in admits], dtype=np.float32)


def _add_masks(out: Sampling, draws: Sequence[StepRow], words: int, fault: Callable[[Request, Exception], None] | None) -> None:
    mask_rows = np.full(len(draws), -1, dtype=np.int32)
    masks = np.zeros((len(draws), words), dtype=np.uint32)
    used = 0
    for i, draw in enumerate(draws):
        grammar = draw.request.grammar
        if grammar is None or not grammar.active or draw.request.lease is None:  # without a lease it has ended
            continue
        try:
            grammar.fill(masks[used])
        except Exception as e:  # the border of one request: the others draw
            if fault is None:
                raise
            fault(draw.request, e)
            continue
        mask_rows[i] = used
        used += 1
    if used:
        out.masks, out.mask_rows = masks[:used], mask_rows
