"""Flat arrays of one step, from the rows it holds.

Most steps are one token more for the rows of the step before: their arrays are made of the last ones (`Batches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import pages_for
from fleet_runtime.engine.base import POOL_LAST, POOL_NONE, POOL_SUM, StepInput
from fleet_runtime.scheduler.request import Request
from fleet_runtime.scheduler.rows import Rows


@dataclass(slots=True)
class StepRow:
    """One row of a step: tokens [begin, begin + count) of its request. place: index of the token it draws, -1 if it draws none."""

    request: Request
    begin: int
    count: int
    place: int
    prefill: bool


def row_of(request: Request, count: int) -> StepRow:
    """The next `count` tokens of a request. It draws if no known token is left then, but for an embedding."""
    begin, place = request.launched, request.length + request.drawing
    draws = begin + count == place and not request.admit.embed
    return StepRow(request, begin, count, place if draws else -1, prefill=begin < request.target)


class Batches:
    """Makes the arrays of one step after the other. Arrays that two steps share are never written to again."""

    def __init__(self, rows: Rows, *, check: bool = False) -> None:
        """Args: check: compares each step's arrays with those made from nothing (--debug-checks)."""
        self._rows = rows
        self._check = check
        self._requests: list[Request] = []  # of the last step, if it was decode alone
        self._moves: list[int] = []  # of their leases, then
        self._last: StepInput | None = None

    def build(self, step: Sequence[StepRow]) -> StepInput:
        """The arrays of the next step; each request's lease already covers its rows."""
        if any(row.prefill for row in step):
            self._requests, self._last = [], None
            return build_step(step, self._rows)
        requests = [row.request for row in step]
        moves = [lease.moves for r in requests if (lease := r.lease) is not None]
        if self._last is not None and requests == self._requests and moves == self._moves:
            out = self._one_more(step, self._last)
            assert not self._check or _equal(out, build_step(step, self._rows)), "the arrays of the last step do not go on in this one"
        else:
            out = build_step(step, self._rows)
        self._requests, self._moves, self._last = requests, moves, out
        return out

    def _one_more(self, step: Sequence[StepRow], last: StepInput) -> StepInput:
        """One token more of each row."""
        positions, context, tables = last.positions + 1, last.context_lens + 1, last.page_tables
        assert positions[0] == step[0].begin and positions[-1] == step[-1].begin, "a row has gone on without its batch"
        begun = np.flatnonzero(positions % PAGE_SIZE == 0).tolist()  # rows that begin a page
        if begun:
            width = pages_for(int(context.max()))
            tables = np.zeros((len(step), width), dtype=np.int32)
            tables[:, : last.page_tables.shape[1]] = last.page_tables
            for i in begun:
                lease, page = step[i].request.lease, step[i].begin // PAGE_SIZE
                assert lease is not None
                tables[i, page] = lease.table[page]
        return StepInput(
            token_ids=np.array(_token_ids(step, self._rows), dtype=np.int32),
            positions=positions,
            row_starts=last.row_starts,
            context_lens=context,
            page_tables=tables,
            sample=last.sample,
            slots=last.slots,
        )


def _equal(one: StepInput, other: StepInput) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(StepInput))


def _token_ids(step: Sequence[StepRow], rows: Rows) -> list[int]:
    """Of rows of one token each."""
    return [rows.relay(r) if (r := row.request).length <= row.begin else r.ids.item(row.begin) for row in step]


def build_step(step: Sequence[StepRow], rows: Rows) -> StepInput:
    """The arrays of one step, from nothing. Pure but for the relay's check."""
    token_ids, positions, starts, context = list[int](), list[int](), [0], list[int]()
    prompt_logprobs = pooled = False
    for row in step:
        request, begin, end = row.request, row.begin, row.begin + row.count
        if row.prefill:
            prompt_logprobs = prompt_logprobs or request.prompt_logprobs is not None
            pooled = pooled or bool(request.admit.embed)
        if end > request.length:
            token_ids.append(rows.relay(request))
        elif row.count == 1:
            token_ids.append(request.ids.item(begin))
        else:
            token_ids += request.ids[begin:end].tolist()
        positions += range(begin, end)
        starts.append(len(positions))
        context.append(end)
    tables = np.zeros((len(step), pages_for(max(context))), dtype=np.int32)
    for i, row in enumerate(step):
        assert row.request.lease is not None
        pages = pages_for(context[i])
        tables[i, :pages] = row.request.lease.table[:pages]
    out = StepInput(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        row_starts=np.array(starts, dtype=np.int32),
        context_lens=np.array(context, dtype=np.int32),
        page_tables=tables,
        sample=np.array([row.place >= 0 for row in step], dtype=np.bool_),
        slots=np.array([row.request.slot for row in step], dtype=np.int32),
    )
    if prompt_logprobs:
        _add_prompt_logprobs(out, step)
    if pooled:
        out.pool = np.array([_pool(row) for row in step], dtype=np.int8)
    return out


def _add_prompt_logprobs(out: StepInput, step: Sequence[StepRow]) -> None:
    """Also the last token of a chunk has a next one, but for that of the last chunk: so the places join without a gap."""
    wanted, next_ids = np.full(len(step), -1, dtype=np.int32), np.full(len(out.token_ids), -1, dtype=np.int32)
    for i, row in enumerate(step):
        request = row.request
        if row.prefill and request.prompt_logprobs is not None:
            wanted[i] = request.admit.prompt_logprobs
            end = min(row.begin + row.count, request.prompt_tokens - 1)
            if end > row.begin:
                at = int(out.row_starts[i])
                next_ids[at : at + end - row.begin] = request.ids[row.begin + 1 : end + 1]
    out.prompt_logprobs, out.next_ids = wanted, next_ids


def _pool(row: StepRow) -> int:
    request = row.request
    if request.admit.embed == "mean":
        return POOL_SUM
    return POOL_LAST if request.admit.embed and row.begin + row.count == request.prompt_tokens else POOL_NONE
