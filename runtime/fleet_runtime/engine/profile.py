"""What an executor says of its speed, measured with four steps at its start. Called by the executors that compute something."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from fleet_contract.names import PAGE_SIZE
from fleet_contract.worker import Profile
from fleet_runtime.engine.base import Sampling, StepInput, StepOutput, greedy

_CHUNK: Final = 64  # tokens of the prefill
_ROWS: Final = 8  # rows of the wider decode step
_CONTEXT: Final = 1024  # context of the long decode step
_REPEATED_BELOW_S: Final = 0.2  # a step that took longer is measured once: on a busy machine the start must not take a minute

Step = Callable[[StepInput, Sampling], StepOutput]


def measured(step: Step, *, num_pages: int, max_step_tokens: int, max_rows: int, context_length: int) -> Profile:
    """Runs a chunk and a few decode steps. Uses pages from 0 on: call it before anything else does."""
    room = min(num_pages * PAGE_SIZE, context_length)
    chunk, context = min(max_step_tokens, _CHUNK, room), min(_CONTEXT, room)
    rows = max(1, min(max_rows, _ROWS, num_pages))
    step(*trial(rows=1, tokens=1))  # first calls of the libraries
    return profile_of(
        chunk=chunk,
        rows=rows,
        context=context,
        chunk_s=_seconds(step, trial(rows=1, tokens=chunk)),
        one_s=_seconds(step, trial(rows=1, tokens=1)),
        rows_s=_seconds(step, trial(rows=rows, tokens=1)),
        context_s=_seconds(step, trial(rows=1, tokens=1, context=context)),
    )


def profile_of(*, chunk: int, rows: int, context: int, chunk_s: float, one_s: float, rows_s: float, context_s: float) -> Profile:
    """Speed from four measured steps: a chunk, one decode row, several, and one with a long context. Pure.

    Other processes disturb such short runs, so what a row adds is kept under half of a step of one row, and what 512 tokens of context add
    under a step of one row; both are far above what an executor really needs.
    """
    per_row_s = min(max(0.0, (rows_s - one_s) / max(1, rows - 1)), one_s / 2)
    return Profile(
        prefill_tokens_per_s=chunk / chunk_s,
        step_base_s=one_s - per_row_s,
        step_per_row_s=per_row_s,
        step_per_ctx_token_s=min(max(0.0, (context_s - one_s) / max(1, context - 1)), one_s / 512),
    )


def trial(*, rows: int, tokens: int, context: int = 0) -> tuple[StepInput, Sampling]:
    """A greedy step of `rows` rows with `tokens` new tokens each; all rows end at `context` if that is more. Rows have pages of their own."""
    context = max(context, tokens)
    pages = -(-context // PAGE_SIZE)
    step = StepInput(
        token_ids=np.zeros(rows * tokens, np.int32),
        positions=np.tile(np.arange(context - tokens, context, dtype=np.int32), rows),
        row_starts=np.arange(rows + 1, dtype=np.int32) * np.int32(tokens),
        context_lens=np.full(rows, context, np.int32),
        page_tables=np.arange(rows * pages, dtype=np.int32).reshape(rows, pages),
        sample=np.ones(rows, np.bool_),
        slots=np.arange(rows, dtype=np.int32),
    )
    return step, greedy(rows)


def _seconds(step: Step, one: tuple[StepInput, Sampling]) -> float:
    """Seconds of a run; of the faster of two if it is short."""
    best = math.inf
    for _ in range(2):
        start = time.perf_counter()
        step(*one)
        best = min(best, time.perf_counter() - start)
        if best > _REPEATED_BELOW_S:
            break
    return best
