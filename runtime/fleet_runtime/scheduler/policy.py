"""What one step holds, and who is next: pure choices under one token budget.

Prefill comes first, yet decode is not starved: decode rows ride along in prefill steps as extends of one token. Where the budget is too
small for that (fewer than one page left beside them), or without `mixed_chunk`, the two alternate, with at most `max_prefill_steps` steps
without decode.

One prompt at a time is cut. While it is, half of the budget is for prompts that fit whole, so that a short one does not wait for a long one.
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
    mixed: bool = True


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
    if limits.mixed and decode_rows + PAGE_SIZE <= limits.step_tokens:
        return decode_rows
    return 0 if prefill_steps < limits.max_prefill_steps else min(decode_rows, limits.step_tokens)


def prefill_budget(limits: Limits, ride: int) -> int:
    """Tokens of prompts beside so many decode rows; without mixed steps none beside any."""
    return limits.step_tokens - ride if limits.mixed or not ride else 0


@dataclass(slots=True)
class PrefillAdder:
    """Fills one step's budget with prompts, in the order in which they are offered. Mutable for the time of one choice."""

    budget: int
    cut: bool = False  # a prompt is cut, in this step or before: no other may be
    used: int = 0  # by prompts that fit whole

    @property
    def whole_room(self) -> int:
        """Most tokens of one more prompt that is computed whole."""
        share = max(PAGE_SIZE, self.budget // 2 // PAGE_SIZE * PAGE_SIZE) if self.cut else 0
        return self.budget - share - self.used

    @property
    def full(self) -> bool:
        return self.whole_room <= 0

    def takes(self, tokens: int) -> bool:
        """True if a prompt with so many tokens left may join the step: whole, or as the one that is cut."""
        return tokens <= self.whole_room or (not self.cut and self.budget - self.used >= PAGE_SIZE)

    def add(self, tokens: int) -> bool:
        """Adds such a prompt; True if it is computed whole."""
        assert self.takes(tokens)
        if tokens <= self.whole_room:
            self.used += tokens
            return True
        self.cut = True
        return False


def plan_chunks(budget: int, left: Sequence[int]) -> list[tuple[int, int]]:
    """(index, tokens) of the prompts in one step, in their order. The one that is cut ends at a page."""
    adder, chunks, long = PrefillAdder(budget), list[tuple[int, int]](), None
    for i, tokens in enumerate(left):
        if not adder.takes(tokens):
            continue
        if adder.add(tokens):
            chunks.append((i, tokens))
        else:
            long = i
    if long is not None:
        chunks.append((long, (budget - adder.used) // PAGE_SIZE * PAGE_SIZE))
    return sorted(chunks)


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
    chunks = plan_chunks(prefill_budget(limits, ride), prefill_left) if prefill_left else []
    return StepPlan(tuple(chunks), tuple(order))
