"""The executor that computes nothing: deterministic tokens and a step-time profile over real pages with real bytes.

Called by the scheduler through `Executor`, made by the executor factory for `simulated://`. It carries load tests of routers and operators,
and the scheduler's own tests. Each token that a step is given is written into its page; the next token is a function of the whole context
*as read back from the pages*, so that a wrong, missing, stale or misplaced page changes every token after it.

It speaks the byte tokenizer: ids 0-255 are bytes, 256 begins a text, 257 ends it, 258 and 259 mark roles. Sampled tokens are printable
ASCII; it never samples 257, so an answer ends by its length, a stop string, or a stop id that the client chose.
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
from fleet_runtime.engine.base import NEVER_DRAWN, U64, KvLayout, Progress, Sampling, StepInput, StepOutput, relayed
from fleet_runtime.errors import StartError

VOCAB_SIZE: Final = 260
TOKEN_BYTES: Final = 64  # KV of one token
_WORDS: Final = TOKEN_BYTES // 8
PAGE_BYTES: Final = PAGE_SIZE * TOKEN_BYTES
_FIRST_PRINTABLE: Final = 32
_PRINTABLE: Final = 95
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
        return 0

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
        for row in range(rows) if self._has_poison else np.flatnonzero(batch.sample):
            context = int(batch.context_lens[row])
            table = batch.page_tables[row, : -(-context // PAGE_SIZE)]
            kv = self._pool[table].reshape(-1, _WORDS)[:context]
            sums[row] = kv.sum(dtype=np.uint64)
            if self._has_poison and bool((kv == _POISON).any()):
                failed[row] = True
        self._batch, self._sums, self._failed = batch, sums, failed
        self._sleep(self._seconds(lengths, batch.context_lens))

    def sample(self, sampling: Sampling) -> StepOutput:
        """See Executor.sample."""
        batch = self._batch
        assert batch is not None, "sample without forward"
        self._batch = None
        rows = np.flatnonzero(batch.sample)
        tokens = np.zeros(len(batch.sample), dtype=np.int32)
        tokens[rows] = self._next_tokens(self._sums[rows], sampling, batch.context_lens[rows])
        self._relay[batch.slots[rows]] = tokens[rows]
        return StepOutput(tokens, self._failed)

    @staticmethod
    def _records(token_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> U64:
        """[T, words] u64: what a page keeps of each token. Never 0 and never poison in its first word."""
        head = (token_ids.astype(np.uint64) + np.uint64(1)) | (positions.astype(np.uint64) << np.uint64(32))
        out = _mix(head[:, None] + _LANES)
        out[:, 0] = head
        return out

    @staticmethod
    def _next_tokens(sums: U64, sampling: Sampling, context_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """[S] int32, printable; a sampled row also depends on its seed and position, and on nothing of the other rows."""
        state = _mix(sums)
        noise = _mix(sampling.seed + context_lens.astype(np.uint64))
        state = np.where(sampling.temperature > 0, _mix(state ^ noise), state)
        return (_FIRST_PRINTABLE + (state % np.uint64(_PRINTABLE))).astype(np.int32)

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
