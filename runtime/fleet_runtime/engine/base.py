"""The seam between scheduler and arithmetic: one step of a batch from flat arrays.

The scheduler owns rows, pages and locks and decides what a step holds; an executor owns weights and KV memory and computes it. One token
budget, one code path: a decode row is an extend of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fleet_contract.worker import Profile

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of the KV pool; two workers hand pages over only if all but `num_pages` are equal."""

    page_size: int  # tokens
    num_pages: int
    page_bytes: int  # of one page over all layers, K and V
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # float32, bfloat16, float16, or bytes (simulated)
    layout: str  # order of the bytes inside a page, a name per executor


@dataclass(slots=True)
class StepInput:
    """One step. R rows, T new tokens in all; row r has tokens [row_starts[r], row_starts[r+1]).

    token_ids: [T] int32. positions: [T] int32, from 0. row_starts: [R+1] int32.
    context_lens: [R] int32, tokens in the row's context after this step (its last position + 1).
    page_tables: [R, P] int32, page numbers of each row in order; entries beyond ceil(context_len / page_size) are undefined.
    sample: [R] bool, rows whose next token is wanted (False: a chunk that is not the prompt's last).
    temperature: [R] float32, 0 = greedy. top_p: [R] float32. seed: [R] uint64.
    The arrays belong to the caller and are not changed during the step.
    """

    token_ids: I32
    positions: I32
    row_starts: I32
    context_lens: I32
    page_tables: I32
    sample: Bools
    temperature: F32
    top_p: F32
    seed: U64


@dataclass(frozen=True, slots=True)
class StepOutput:
    """tokens: [R] int32, defined where `sample` was set and not `failed`. failed: [R] bool, rows that computed something that is
    not finite, sampled or not: what they wrote must not be used."""

    tokens: I32
    failed: Bools


class Executor(Protocol):
    """Computes steps. Not thread-safe but for `read_page` and `write_page`, which an I/O thread may call for pages that no running step
    uses."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def profile(self) -> Profile:
        """Measured or configured speed, for the router's first guess."""
        ...

    def step(self, batch: StepInput) -> StepOutput:
        """Computes one step; blocks until it is done. Raises only for faults of the device or of ours, never for a request's content."""
        ...

    def read_page(self, page: int) -> bytes:
        """A copy of one page, `layout.page_bytes` long."""
        ...

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """Overwrites one page."""
        ...

    def poison(self, pages: Sequence[int]) -> None:
        """Fills freed pages so that any later read shows (debug_checks)."""
        ...


# A factory reports loading in percent, and what it does in a few words.
Progress = Callable[[int, str], None]
