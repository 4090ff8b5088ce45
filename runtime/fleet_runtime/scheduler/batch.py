"""Flat arrays of one step, from the rows it holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet_runtime.cache.memory import pages_for
from fleet_runtime.engine.base import Sampling, StepInput
from fleet_runtime.scheduler.request import Request


def build_step(rows: Sequence[tuple[Request, int]]) -> tuple[StepInput, Sampling]:
    """One step of `(request, new tokens)`, and how its sampled rows draw; each request's lease already covers them.

    A row whose last known token is in the step is sampled.
    """
    count = len(rows)
    starts = np.zeros(count + 1, dtype=np.int32)
    np.cumsum([n for _, n in rows], out=starts[1:])
    context = np.fromiter((r.computed + n for r, n in rows), dtype=np.int32, count=count)
    token_ids = np.empty(starts[-1], dtype=np.int32)
    positions = np.empty(starts[-1], dtype=np.int32)
    tables = np.zeros((count, pages_for(int(context.max()))), dtype=np.int32)
    for i, (request, n) in enumerate(rows):
        assert request.lease is not None
        begin, end = request.computed, request.computed + n
        token_ids[starts[i] : starts[i + 1]] = request.ids[begin:end]
        positions[starts[i] : starts[i + 1]] = np.arange(begin, end, dtype=np.int32)
        pages = pages_for(end)
        tables[i, :pages] = request.lease.table[:pages]
    sampled = [r for r, n in rows if r.computed + n == r.length]
    step = StepInput(
        token_ids=token_ids,
        positions=positions,
        row_starts=starts,
        context_lens=context,
        page_tables=tables,
        sample=np.fromiter((r.computed + n == r.length for r, n in rows), dtype=np.bool_, count=count),
        slots=np.arange(count, dtype=np.int32),
    )
    return step, sampling_of(sampled)


def sampling_of(requests: Sequence[Request]) -> Sampling:
    """How these requests draw their next token."""
    count = len(requests)
    return Sampling(
        temperature=np.fromiter((r.admit.temperature for r in requests), dtype=np.float32, count=count),
        top_k=np.fromiter((r.admit.top_k for r in requests), dtype=np.int32, count=count),
        top_p=np.fromiter((r.admit.top_p for r in requests), dtype=np.float32, count=count),
        min_p=np.fromiter((r.admit.min_p for r in requests), dtype=np.float32, count=count),
        seed=np.fromiter((r.seed for r in requests), dtype=np.uint64, count=count),
    )
