"""The seam between scheduler and arithmetic: one step of a batch from flat arrays.

The scheduler owns rows, pages and locks and decides what a step holds; an executor owns weights and KV memory and computes it. One token
budget, one code path: a decode row is an extend of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

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
    """What one step computes. R rows, T new tokens in all; row r has tokens [row_starts[r], row_starts[r+1]).

    token_ids: [T] int32. A value -1-s is the token that slot s drew last (the relay): so a step can be queued before the draw of the step
        before it is known.
    positions: [T] int32, from 0. row_starts: [R+1] int32.
    context_lens: [R] int32, tokens in the row's context after this step (its last position + 1).
    page_tables: [R, P] int32, page numbers of each row in order; entries beyond ceil(context_len / page_size) are undefined.
    sample: [R] bool, rows whose next token is wanted (False: a chunk that is not the prompt's last).
    slots: [R] int32, the relay slot of each row, below `Executor.slots`; live requests never share one.
    prompt_logprobs: [R] int32, -1: none; k: for each new token of the row that a next one follows (`next_ids`), logprob of that next token and the
        k most likely. None: no row wants them.
    next_ids: [T] int32, the token that follows each new token in the prompt; only read where prompt logprobs are wanted. -1: none follows.
    pool: [R] int8, POOL_*: hidden states that are wanted of a row. None: of no row.
    The arrays belong to the caller and are not changed until the step's results are taken.
    """

    token_ids: I32
    positions: I32
    row_starts: I32
    context_lens: I32
    page_tables: I32
    sample: Bools
    slots: I32
    prompt_logprobs: I32 | None = None
    next_ids: I32 | None = None
    pool: npt.NDArray[np.int8] | None = None


NEVER_DRAWN: Final = -(1 << 31)  # what a relay slot holds before its first draw: a row that reads it has failed


def relayed(token_ids: I32, relay: I32) -> I32:
    """`token_ids` with the relay's tokens in place of the references to its slots. Pure."""
    out = token_ids.copy()
    at = np.flatnonzero(token_ids < 0)
    out[at] = relay[-1 - token_ids[at]]
    return out


POOL_NONE: Final = 0
POOL_LAST: Final = 1  # the final norm's output at the row's last new token
POOL_SUM: Final = 2  # summed over the row's new tokens (mean pooling, joined over chunks)


@dataclass(slots=True)
class Sampling:
    """How the S rows with `sample` set draw, in row order. Order of application, and sources: fleet_runtime.engine.sampler.

    temperature: [S] float32, below 1e-6 is greedy. top_k: [S] int32, 0 = all. top_p, min_p: [S] float32. seed: [S] uint64.
    logprobs: [S] int32, -1: none; k: the chosen token's logprob and the k most likely, after bias, penalties and masks, before temperature.
    bias_*: logit_bias, and -inf for what `min_tokens` forbids: row s adds bias_values[j] to bias_ids[j] for j in [bias_starts[s], bias_starts[s+1]);
        an id that is no token of the model does nothing.
    count_*: tokens of the row's context that penalties look at, distinct: ids, how often in the answer, and all of prompt and answer (answer
        count 0: prompt only). repetition, frequency, presence: [S] float32 (1, 0, 0: none).
    masks: [M, ceil(vocab / 32)] uint32, bit set: allowed (bit i % 32 of word i // 32). mask_rows: [S] int32, row of `masks` or -1.
    Optional fields that are None concern no row.
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    seed: U64
    logprobs: I32 | None = None
    bias_starts: I32 | None = None
    bias_ids: I32 | None = None
    bias_values: F32 | None = None
    count_starts: I32 | None = None
    count_ids: I32 | None = None
    counts: I32 | None = None
    repetition: F32 | None = None
    frequency: F32 | None = None
    presence: F32 | None = None
    masks: npt.NDArray[np.uint32] | None = None
    mask_rows: I32 | None = None


def greedy(rows: int) -> Sampling:
    """The most likely token of each of `rows` rows."""
    return Sampling(
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.uint64),
    )


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Of n places: chosen: [n] float32. ids: [n, k] int32, most likely first, ties to the lowest id. values: [n, k] float32."""

    chosen: F32
    ids: I32
    values: F32


@dataclass(frozen=True, slots=True)
class StepOutput:
    """tokens: [R] int32, defined where `sample` was set and not `failed`. failed: [R] bool, rows that computed something that is
    not finite, sampled or not: what they wrote must not be used.

    logprobs: by row, one place each, k as the row asked. prompt_logprobs: by row, its new tokens but those without a next one.
    pooled: by row, [hidden] float32.
    """

    tokens: I32
    failed: Bools
    logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    pooled: dict[int, F32] = field(default_factory=dict)


class Executor(Protocol):
    """Computes steps, on whichever one thread calls it at a time. Not thread-safe but for `read_page` and `write_page`, which an I/O thread
    may call for pages that no running step uses."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def profile(self) -> Profile:
        """Measured or configured speed, for the router's first guess."""
        ...

    @property
    def slots(self) -> int:
        """Relay slots: rows that may be live at once. A slot keeps the token it drew last."""
        ...

    @property
    def hidden_size(self) -> int:
        """Length of a pooled vector; 0 if this executor has none."""
        ...

    def step(self, batch: StepInput, sampling: Sampling) -> StepOutput:
        """`forward` and `sample` in one call, with equal results; blocks until it is done, without the interpreter's lock while it computes.
        Raises only for faults of the device or of ours, never for a request's content."""
        ...

    def forward(self, batch: StepInput) -> None:
        """All of a step but the draw, for rows whose mask or counts depend on the step before. `sample` must follow before the next step."""
        ...

    def sample(self, sampling: Sampling) -> StepOutput:
        """Draws for the rows of the last `forward`, and writes their tokens to the relay."""
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
