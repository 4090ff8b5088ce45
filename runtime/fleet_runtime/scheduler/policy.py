"""What one step holds: a pure choice under one token budget.

Prefill comes first, yet decode is not starved: decode rows ride along in prefill steps as extends of one token. Only where the budget is
too small for that (fewer than one page left beside them) the two alternate, with at most `max_prefill_steps` steps without decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet_contract.names import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Limits:
    """Flags that bound a step."""

    step_tokens: int
    max_prefill_steps: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """chunks: (index into the prefill rows, tokens). decode: indices into the decode rows, one token each."""

    chunks: tuple[tuple[int, int], ...] = ()
    decode: tuple[int, ...] = ()


def decode_ride(limits: Limits, *, decode_rows: int, prefill_steps: int) -> int:
    """Decode rows that a step with prefill carries.

    Args:
        decode_rows: rows that want a token.
        prefill_steps: steps since the last one that carried decode rows.
    """
    if decode_rows + PAGE_SIZE <= limits.step_tokens:
        return decode_rows
    return 0 if prefill_steps < limits.max_prefill_steps else min(decode_rows, limits.step_tokens)


def plan_step(limits: Limits, prefill_left: Sequence[int], decode_last: Sequence[int], *, prefill_steps: int) -> StepPlan:
    """Chooses one step.

    Args:
        prefill_left: prompt tokens left of each prefilling row, in order of admission; each row starts at a page boundary.
        decode_last: step number in which each decode row last got a token; those that waited longest go first.
        prefill_steps: steps since the last one that carried decode rows.
    Returns:
        Chunks end at page boundaries but for the last of a prompt; the sum of all tokens is within the budget; never empty if a row is given.
    """
    rows = len(decode_last)
    ride = min(rows, limits.step_tokens)
    if prefill_left:
        ride = decode_ride(limits, decode_rows=rows, prefill_steps=prefill_steps)
    order = list(range(rows)) if ride == rows else sorted(range(rows), key=lambda i: decode_last[i])[:ride]
    budget = limits.step_tokens - ride
    chunks: list[tuple[int, int]] = []
    for i, left in enumerate(prefill_left):
        tokens = left if left <= budget else budget // PAGE_SIZE * PAGE_SIZE
        if tokens == 0:
            break
        chunks.append((i, tokens))
        budget -= tokens
        if tokens < left:
            break  # one chunked prompt at a time
    return StepPlan(tuple(chunks), tuple(order))
