"""Flat arrays of one step, from the rows it holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet_runtime.cache.memory import pages_for
from fleet_runtime.engine.base import StepInput
from fleet_runtime.scheduler.request import Request


def build_step(rows: Sequence[tuple[Request, int]]) -> StepInput:
    """One step of `(request, new tokens)`; each request's lease already covers them. A row whose last known token is in the step is sampled."""
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
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        row_starts=starts,
        context_lens=context,
        page_tables=tables,
        sample=np.fromiter((r.computed + n == r.length for r, n in rows), dtype=np.bool_, count=count),
        temperature=np.fromiter((r.admit.temperature for r, _ in rows), dtype=np.float32, count=count),
        top_p=np.fromiter((r.admit.top_p for r, _ in rows), dtype=np.float32, count=count),
        seed=np.fromiter((r.seed for r, _ in rows), dtype=np.uint64, count=count),
    )
