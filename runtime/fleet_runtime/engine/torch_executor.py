"""The reference executor: a model of `fleet_runtime.models` on torch, paged KV, one batched forward per step.

Made by the factory inside the scheduler process, which is its only caller. The same StepInput over the same pages gives the same bits;
another batch or chunking moves logits by rounding (matrix products choose their order by shape).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fleet_contract.launch import RuntimeLaunch
from fleet_contract.memory import memory_limit_bytes
from fleet_contract.names import PAGE_SIZE
from fleet_contract.worker import Profile
from fleet_runtime.engine import sampler
from fleet_runtime.engine.base import (
    F32,
    NEVER_DRAWN,
    POOL_LAST,
    POOL_NONE,
    Bools,
    KvLayout,
    Progress,
    Sampling,
    StepInput,
    StepOutput,
    TopLogprobs,
    relayed,
)  # fmt: skip
from fleet_runtime.engine.kv_pool import KvPool, page_bytes
from fleet_runtime.engine.memory import check_memory, pages_in, step_bytes
from fleet_runtime.engine.paged_attention import StepAttention
from fleet_runtime.engine.profile import measured
from fleet_runtime.errors import StartError
from fleet_runtime.models.base import CausalLm
from fleet_runtime.models.families import spec_of
from fleet_runtime.models.files import read_config
from fleet_runtime.models.registry import load_model
from fleet_runtime.models.weights import count_parameters

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_LOGIT_ROWS: Final = 64  # places of a prompt whose logits are computed at once
_DTYPES: Final = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchExecutor:
    """See engine.base.Executor. Owns the model and the KV pages."""

    def __init__(self, model: CausalLm, pool: KvPool, *, slots: int) -> None:
        self._model = model
        self._pool = pool
        self._relay = np.full(slots, NEVER_DRAWN, np.int32)
        self._pending: tuple[StepInput, torch.Tensor] | None = None  # a `forward` whose `sample` has not come, and its hidden states
        self._profile = Profile()

    @property
    def layout(self) -> KvLayout:
        return self._pool.layout

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def profile(self) -> Profile:
        return self._profile

    @property
    def slots(self) -> int:
        return len(self._relay)

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size

    def step(self, batch: StepInput, sampling: Sampling) -> StepOutput:
        """See Executor.step."""
        self.forward(batch)
        return self.sample(sampling)

    def forward(self, batch: StepInput) -> None:
        """See Executor.forward."""
        self._pending = batch, self._hidden(batch)

    def sample(self, sampling: Sampling) -> StepOutput:
        """See Executor.sample."""
        assert self._pending is not None, "sample without forward"
        (batch, hidden), self._pending = self._pending, None
        rows, last = np.flatnonzero(batch.sample), _last_of_rows(batch, hidden)
        # A row attends to all of its context, so what is not finite anywhere in its KV has reached its last token: also a chunk that is
        # not sampled is checked before its pages may be used by others.
        failed = (~torch.isfinite(last).all(dim=1)).numpy()
        tokens = np.zeros(len(batch.sample), np.int32)
        logits = self._logits_of(last, rows)
        drawn = sampler.sample(logits, sampling, batch.context_lens[rows])
        tokens[rows] = drawn.tokens
        failed[rows] |= drawn.failed
        logprobs = {int(rows[s]): found for s, found in drawn.logprobs.items()}
        prompt_logprobs, pooled = self._prompt_logprobs(batch, hidden, failed), self._pooled(batch, hidden, failed)
        self._relay[batch.slots[rows]] = np.where(failed[rows], NEVER_DRAWN, tokens[rows])
        return StepOutput(tokens, failed, _of_good(logprobs, failed), _of_good(prompt_logprobs, failed), _of_good(pooled, failed))

    def logits(self, batch: StepInput) -> F32:
        """Computes a step without drawing: [rows with `sample`, vocab] float32. Called by tests."""
        return self._logits_of(_last_of_rows(batch, self._hidden(batch)), np.flatnonzero(batch.sample))

    @torch.inference_mode()
    def _hidden(self, batch: StepInput) -> torch.Tensor:
        """Runs the step: [T, hidden], before the final norm."""
        attention = StepAttention(self._pool, batch)
        token_ids = torch.from_numpy(relayed(batch.token_ids, self._relay).astype(np.int64))
        positions = torch.from_numpy(batch.positions.astype(np.int64))
        return self._model.forward(token_ids, positions, attention)

    @torch.inference_mode()
    def _logits_of(self, last: torch.Tensor, rows: npt.NDArray[np.intp]) -> F32:
        out: F32 = self._model.logits(self._model.normed(last[torch.from_numpy(rows)])).numpy()
        return out

    @torch.inference_mode()
    def _pooled(self, batch: StepInput, hidden: torch.Tensor, failed: Bools) -> dict[int, F32]:
        """Of rows that want one; a row whose vector is not finite fails, here."""
        out: dict[int, F32] = {}
        for row in [] if batch.pool is None else np.flatnonzero((batch.pool != POOL_NONE) & ~failed).tolist():
            start, end = int(batch.row_starts[row]), int(batch.row_starts[row + 1])
            if batch.pool is not None and batch.pool[row] == POOL_LAST:
                start = end - 1
            vector: F32 = self._model.normed(hidden[start:end]).float().sum(dim=0).numpy()
            if np.isfinite(vector).all():
                out[row] = vector
            else:
                failed[row] = True
        return out

    @torch.inference_mode()
    def _prompt_logprobs(self, batch: StepInput, hidden: torch.Tensor, failed: Bools) -> dict[int, TopLogprobs]:
        """Of rows that want them, in pieces, since logits of a whole chunk are large; a row with logits that are none fails, here."""
        out: dict[int, TopLogprobs] = {}
        if batch.prompt_logprobs is None or batch.next_ids is None:
            return out
        for row in np.flatnonzero((batch.prompt_logprobs >= 0) & ~failed).tolist():
            places = np.arange(batch.row_starts[row], batch.row_starts[row + 1])
            places = places[batch.next_ids[places] >= 0]
            pieces = []
            for start in range(0, len(places), _LOGIT_ROWS):
                piece = places[start : start + _LOGIT_ROWS]
                logits = self._logits_of(hidden, piece)
                if not (logits.max(axis=1) < np.inf).all():
                    failed[row] = True
                    break
                pieces.append(sampler.top_logprobs(logits, batch.next_ids[piece], int(batch.prompt_logprobs[row])))
            if not failed[row]:
                out[row] = sampler.joined(pieces, int(batch.prompt_logprobs[row]))
        return out

    def read_page(self, page: int) -> bytes:
        """See Executor.read_page."""
        return self._pool.read(page)

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """See Executor.write_page. Raises ValueError for another length than a page's."""
        self._pool.write(page, data)

    def poison(self, pages: Sequence[int]) -> None:
        """See Executor.poison: NaN."""
        self._pool.fill(pages, float("nan"))

    def warm_up(self, *, max_step_tokens: int, max_rows: int, context_length: int) -> None:
        """Runs a chunk and a few decode steps, which measures the profile. Uses pages from 0 on: call it before anything else does."""
        limits = {"max_step_tokens": max_step_tokens, "max_rows": max_rows, "context_length": context_length}
        self._profile = measured(self.step, num_pages=self.layout.num_pages, **limits)


def _of_good(found: dict[int, _T], failed: Bools) -> dict[int, _T]:
    return {row: value for row, value in found.items() if not failed[row]}


def _last_of_rows(batch: StepInput, hidden: torch.Tensor) -> torch.Tensor:
    """[R, hidden], the last new token of each row."""
    return hidden[torch.from_numpy(batch.row_starts[1:].astype(np.int64) - 1)]


def _step_bytes(flags: RuntimeLaunch, folder: Path, dtype: torch.dtype) -> int:
    """Of `step_bytes`; 0 for a model that `families` does not describe."""
    try:
        spec = spec_of(folder, read_config(folder))
    except StartError:
        return 0
    sizes = {"step_tokens": flags.max_step_tokens, "rows": flags.max_rows, "context": flags.context_length}
    return step_bytes(spec, **sizes, itemsize=dtype.itemsize)


def load_torch_executor(flags: RuntimeLaunch, folder: Path, threads: int, progress: Progress) -> TorchExecutor:
    """Loads a model folder, reserves its KV pages, warms up. Raises StartError(ModelInvalid | OutOfMemory | BadFlag)."""
    start = time.monotonic()
    torch.set_num_threads(threads)
    dtype = _DTYPES[flags.dtype]
    step = _step_bytes(flags, folder, dtype)
    check_memory(count_parameters(folder) * dtype.itemsize, flags.kv_cache_memory, memory_limit_bytes(), step=step)
    try:
        model = load_model(folder, dtype=dtype, context_length=flags.context_length, progress=progress)
        if flags.context_length > model.max_context:
            raise StartError(
                "BadFlag",
                f"--context-length is {flags.context_length}, the model was made for at most {model.max_context} tokens "
                "(max_position_embeddings in its config.json); lower it",
            )
        num_pages = pages_in(flags.kv_cache_memory, page_bytes(model.kv_shape, dtype), flags.context_length)
        pool = KvPool(model.kv_shape, num_pages, dtype)
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "memory" not in str(e):  # torch's allocator raises RuntimeError
            raise
        raise StartError("OutOfMemory", f"cannot allocate weights and KV cache ({e}); lower --kv-cache-memory or use a smaller model") from e
    loaded = time.monotonic()
    progress(100, "warming up")
    executor = TorchExecutor(model, pool, slots=flags.max_rows)
    executor.warm_up(max_step_tokens=flags.max_step_tokens, max_rows=flags.max_rows, context_length=flags.context_length)
    _log.info(
        "torch executor ready: %s, %d threads, KV pages for %d tokens (%d bytes a token); loaded in %.1f s, warmed up in %.1f s",
        str(dtype).removeprefix("torch."), threads, num_pages * PAGE_SIZE, pool.layout.page_bytes // PAGE_SIZE,
        loaded - start, time.monotonic() - loaded,
    )  # fmt: skip
    return executor
