"""The executor that computes nothing: deterministic tokens and a step-time profile over real pages with real bytes.

Called by the scheduler through `Executor`, made by the executor factory for `simulated://`. It carries load tests of routers and operators,
and the scheduler's own tests. Each token that a step is given is written into its page; the next token is a function of the whole context
*as read back from the pages*, so that a wrong, missing, stale or misplaced page changes every token after it.

It speaks the byte tokenizer: ids 0-255 are bytes, 256 begins a text, 257 ends it, 258 and 259 mark roles. Sampled tokens are printable
ASCII; it does not sample 257 unless bias or a mask make it, so an answer ends by its length, a stop string, or a stop id that the client chose.

Of `Sampling` it honours temperature (0 or not), seed, bias, penalties, masks and logprobs: rows that want more than a token get made-up logits in
which the token of a plain row is the most likely and printable ones come next. top_k, top_p and min_p change nothing. Pooled vectors and logprobs
of prompts are made up of the context, too, and so are equal for any chunks and any batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fleet_contract.launch import RuntimeLaunch
from fleet_contract.names import PAGE_SIZE
from fleet_contract.worker import Profile
from fleet_runtime.engine import sampler
from fleet_runtime.engine.base import (
    F32,
    I32,
    NEVER_DRAWN,
    POOL_LAST,
    POOL_NONE,
    U64,
    Bools,
    KvLayout,
    Progress,
    Sampling,
    StepInput,
    StepOutput,
    TopLogprobs,
    relayed,
)
from fleet_runtime.errors import StartError

VOCAB_SIZE: Final = 260
TOKEN_BYTES: Final = 64  # KV of one token
_WORDS: Final = TOKEN_BYTES // 8
PAGE_BYTES: Final = PAGE_SIZE * TOKEN_BYTES
_FIRST_PRINTABLE: Final = 32
_PRINTABLE: Final = 95
_HIDDEN: Final = 16  # length of a pooled vector
_UNLIKELY: Final = -40.0  # logit under which what is not printable lies
_POISON: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_LANES: Final = np.arange(_WORDS, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)


def _mix(x: U64) -> U64:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014), element by element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


class SimulatedExecutor:
    """See the module. `sleep` gets the seconds a step should take; tests give a virtual clock."""

    def __init__(self, *, num_pages: int, profile: Profile, slots: int = 64, sleep: Callable[[float], None] = time.sleep) -> None:
        self._layout = KvLayout(
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            page_bytes=PAGE_BYTES,
            layers=1,
            kv_heads=1,
            head_dim=TOKEN_BYTES,
            dtype="bytes",
            layout="simulated",
        )
        self._profile = profile
        self._sleep = sleep
        self._pool: U64 = np.zeros((num_pages, PAGE_SIZE, _WORDS), dtype=np.uint64)
        self._has_poison = False
        self._relay = np.full(slots, NEVER_DRAWN, dtype=np.int32)
        self._batch: StepInput | None = None  # of a `forward` whose `sample` has not come
        self._sums = np.zeros(0, dtype=np.uint64)
        self._failed = np.zeros(0, dtype=np.bool_)
        self._prompt_logprobs: dict[int, TopLogprobs] = {}
        self._pooled: dict[int, F32] = {}

    @classmethod
    def from_flags(cls, flags: RuntimeLaunch, progress: Progress | None = None) -> SimulatedExecutor:
        """Makes one of a worker's flags; takes `simulated_load_s` seconds, as loading a model would. Raises StartError."""
        num_pages = flags.kv_cache_memory // PAGE_BYTES
        if num_pages < 1:
            raise StartError("OutOfMemory", f"--kv-cache-memory {flags.kv_cache_memory} holds no page of {PAGE_BYTES} bytes; give more")
        end = time.monotonic() + flags.simulated_load_s
        while (left := end - time.monotonic()) > 0:
            if progress is not None:
                progress(int(100 * (1 - left / flags.simulated_load_s)), "loading the simulated model")
            time.sleep(min(left, 0.05))
        profile = Profile(
            prefill_tokens_per_s=flags.simulated_prefill_tokens_per_s,
            step_base_s=flags.simulated_step_base_ms / 1e3,
            step_per_row_s=flags.simulated_step_per_row_ms / 1e3,
            step_per_ctx_token_s=flags.simulated_step_per_ctx_token_us / 1e6,
        )
        return cls(num_pages=num_pages, profile=profile, slots=flags.max_rows)

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def profile(self) -> Profile:
        return self._profile

    @property
    def slots(self) -> int:
        return len(self._relay)

    @property
    def hidden_size(self) -> int:
        return _HIDDEN

    def step(self, batch: StepInput, sampling: Sampling) -> StepOutput:
        """See Executor.step."""
        self.forward(batch)
        return self.sample(sampling)

    def forward(self, batch: StepInput) -> None:
        """Writes the new tokens into their pages, then reads each sampled row's context back; sleeps as the profile says."""
        rows = len(batch.context_lens)
        lengths = np.diff(batch.row_starts)
        row_of_token = np.repeat(np.arange(rows), lengths)
        pages = batch.page_tables[row_of_token, batch.positions // PAGE_SIZE]
        token_ids = relayed(batch.token_ids, self._relay)
        self._pool[pages, batch.positions % PAGE_SIZE] = self._records(token_ids, batch.positions)
        sums = np.zeros(rows, dtype=np.uint64)
        failed = np.zeros(rows, dtype=np.bool_)
        failed[row_of_token[token_ids == NEVER_DRAWN]] = True
        self._prompt_logprobs, self._pooled = {}, {}
        more = _wants_more(batch)
        for row in range(rows) if self._has_poison else np.flatnonzero(batch.sample | more):
            context = int(batch.context_lens[row])
            table = batch.page_tables[row, : -(-context // PAGE_SIZE)]
            kv = self._pool[table].reshape(-1, _WORDS)[:context]
            sums[row] = kv.sum(dtype=np.uint64)
            if more[row]:
                self._look_at_places(batch, int(row), _mix(kv.sum(axis=1, dtype=np.uint64).cumsum(dtype=np.uint64)[context - lengths[row] :]))
            if self._has_poison and bool((kv == _POISON).any()):
                failed[row] = True
        self._batch, self._sums, self._failed = batch, sums, failed
        self._sleep(self._seconds(lengths, batch.context_lens))

    def sample(self, sampling: Sampling) -> StepOutput:
        """See Executor.sample."""
        batch = self._batch
        assert batch is not None, "sample without forward"
        self._batch = None
        rows, failed = np.flatnonzero(batch.sample), self._failed
        tokens = np.zeros(len(batch.sample), dtype=np.int32)
        states = self._states(self._sums[rows], sampling, batch.context_lens[rows])
        tokens[rows] = _printable(states)
        logprobs: dict[int, TopLogprobs] = {}
        for s in np.flatnonzero(_wants_logits(sampling)).tolist():
            logits = sampler.adjusted(_logits(states[s : s + 1])[0], sampling, s)
            row, best = int(rows[s]), int(logits.argmax())
            tokens[row] = best
            failed[row] |= not np.isfinite(logits[best])
            if sampling.logprobs is not None and sampling.logprobs[s] >= 0 and not failed[row]:
                logprobs[row] = sampler.top_logprobs(logits[None], tokens[row : row + 1], int(sampling.logprobs[s]))
        self._relay[batch.slots[rows]] = np.where(failed[rows], NEVER_DRAWN, tokens[rows])
        places = {r: v for r, v in self._prompt_logprobs.items() if not failed[r]}
        pooled = {r: v for r, v in self._pooled.items() if not failed[r]}
        return StepOutput(tokens, failed, logprobs, places, pooled)

    def _look_at_places(self, batch: StepInput, row: int, states: U64) -> None:
        """Logprobs of the prompt and the pooled vector of a row, from the states after each of its new tokens."""
        if batch.pool is not None and batch.pool[row] != POOL_NONE:
            vectors = _vectors(states[-1:] if batch.pool[row] == POOL_LAST else states)
            self._pooled[row] = vectors.sum(axis=0, dtype=np.float32)
        if batch.prompt_logprobs is not None and batch.next_ids is not None and batch.prompt_logprobs[row] >= 0:
            following = batch.next_ids[batch.row_starts[row] : batch.row_starts[row + 1]]
            at, k = np.flatnonzero((following >= 0) & (following < VOCAB_SIZE)), int(batch.prompt_logprobs[row])
            self._prompt_logprobs[row] = sampler.top_logprobs(_logits(states[at]), following[at], k)

    @staticmethod
    def _records(token_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> U64:
        """[T, words] u64: what a page keeps of each token. Never 0 and never poison in its first word."""
        head = (token_ids.astype(np.uint64) + np.uint64(1)) | (positions.astype(np.uint64) << np.uint64(32))
        out = _mix(head[:, None] + _LANES)
        out[:, 0] = head
        return out

    @staticmethod
    def _states(sums: U64, sampling: Sampling, context_lens: npt.NDArray[np.int32]) -> U64:
        """What the next token is made of; a sampled row also depends on its seed and position, and on nothing of the other rows."""
        state = _mix(sums)
        noise = _mix(sampling.seed + context_lens.astype(np.uint64))
        return np.where(sampling.temperature > 0, _mix(state ^ noise), state)

    def _seconds(self, lengths: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int32]) -> float:
        p = self._profile
        prefill = int(lengths[lengths > 1].sum())
        seconds = p.step_base_s + p.step_per_row_s * len(lengths) + p.step_per_ctx_token_s * int(context_lens.sum())
        return seconds + (prefill / p.prefill_tokens_per_s if p.prefill_tokens_per_s else 0.0)

    def read_page(self, page: int) -> bytes:
        return bytes(self._pool[page].tobytes())

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        self._pool[page] = np.frombuffer(data, dtype=np.uint64).reshape(PAGE_SIZE, _WORDS)

    def poison(self, pages: Sequence[int]) -> None:
        self._has_poison = True
        self._pool[list(pages)] = _POISON


def _printable(states: U64) -> I32:
    """[S] the token of each state."""
    return (_FIRST_PRINTABLE + (states % np.uint64(_PRINTABLE))).astype(np.int32)


def _logits(states: U64) -> F32:
    """[S, vocab]: 0 for the state's token, -9 to -1 for other printable ones, all else far below."""
    hashed = _mix(states[:, None] + _mix(np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64)))
    out = -1.0 - 8.0 * (hashed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    out[:, :_FIRST_PRINTABLE] += _UNLIKELY
    out[:, _FIRST_PRINTABLE + _PRINTABLE :] += _UNLIKELY
    out[np.arange(len(states)), _printable(states)] = 0.0
    return out.astype(np.float32)


def _vectors(states: U64) -> F32:
    """[S, hidden]: multiples of 1/1024 from -1 to 1, so that sums of some thousands are exact in any order."""
    hashed = _mix(states[:, None] + _mix(np.arange(1, _HIDDEN + 1, dtype=np.uint64)))
    return (hashed >> np.uint64(53)).astype(np.float32) / np.float32(1024) - np.float32(1)


def _wants_more(batch: StepInput) -> Bools:
    """[R] rows of which more is wanted than a token."""
    out = np.zeros(len(batch.sample), dtype=np.bool_)
    if batch.pool is not None:
        out |= batch.pool != POOL_NONE
    if batch.prompt_logprobs is not None:
        out |= batch.prompt_logprobs >= 0
    return out


def _wants_logits(sampling: Sampling) -> Bools:
    """[S] rows whose token is not just that of their state."""
    out = np.zeros(len(sampling.temperature), dtype=np.bool_)
    for starts in (sampling.bias_starts, sampling.count_starts):
        if starts is not None:
            out |= np.diff(starts) > 0
    if sampling.mask_rows is not None:
        out |= sampling.mask_rows >= 0
    if sampling.logprobs is not None:
        out |= sampling.logprobs >= 0
    return out
