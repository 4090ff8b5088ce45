"""The executor `native`: a described model (models.spec) on a C++ library, one call per step. Loads neither torch nor transformers.

Made by the factory inside the scheduler process, whose engine thread is its only caller. Weights are packed once (bfloat16, or int8 per output
channel), KV pages are bfloat16. A row's bits depend on its own tokens alone: not on the batch, on chunks, on cached prefixes or on threads.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fleet_contract.launch import RuntimeLaunch
from fleet_contract.memory import memory_limit_bytes
from fleet_contract.names import PAGE_SIZE
from fleet_contract.worker import Profile
from fleet_runtime.engine.base import F32, POOL_NONE, Bools, KvLayout, Progress, Sampling, StepInput, StepOutput, TopLogprobs
from fleet_runtime.engine.memory import check_memory, pages_in
from fleet_runtime.engine.native.library import (
    BAD_PAGE,
    DTYPE_BF16,
    DTYPE_F32,
    KINDS,
    NO_FORWARD,
    NO_MEMORY,
    OK,
    Block,
    ModelDesc,
    NoLibrary,
    SamplingDesc,
    StepDesc,
    address,
    fitting,
    load_library,
)
from fleet_runtime.engine.profile import measured
from fleet_runtime.errors import StartError
from fleet_runtime.models.families import spec_of
from fleet_runtime.models.files import read_config
from fleet_runtime.models.spec import LAYER_WEIGHTS, MODEL_WEIGHTS, ModelSpec
from fleet_runtime.models.weights import open_weights

_log = logging.getLogger(__name__)

LAYOUT: Final = "layer-head-kpairs-vpairs"  # of a page: [layers][kv_heads]{K [head_dim / 2][16][2], V [8][head_dim][2]}
_POISON: Final = 0x7FC0  # NaN in bfloat16
_MAX_GROUP: Final = 256  # query heads per KV head
_NORMS: Final = frozenset("input_norm q_norm k_norm attention_post_norm mlp_norm mlp_post_norm final_norm".split())

Array = npt.NDArray[Any]
_T = TypeVar("_T")


class Weights(Protocol):
    """What gives out a model's weights by the names of models.spec; see models.weights."""

    def get(self, name: str) -> Array:
        """Row-major; uint16 for bfloat16, else any float."""
        ...

    def release(self, name: str) -> None:
        """The weight was copied."""
        ...


def refusal_of(spec: ModelSpec) -> str | None:
    """Why the native executor cannot compute a model; None when it can. Pure."""
    if spec.head_dim % 16:
        return f"its head_dim is {spec.head_dim}, the native executor needs a multiple of 16"
    if spec.heads // spec.kv_heads > _MAX_GROUP:
        return f"{spec.heads // spec.kv_heads} query heads share a KV head, the native executor takes at most {_MAX_GROUP}"
    return None


class NativeExecutor:
    """See engine.base.Executor. Owns the library's engine: weights, pages, threads."""

    _engine: int | None = None

    def __init__(
        self, spec: ModelSpec, weights: Weights, *, num_pages: int, slots: int, threads: int, int8: bool = False, level: str | None = None
    ) -> None:
        """Packs the weights and reserves the pages. level: see load_library.

        Raises StartError(ModelInvalid), NoLibrary, MemoryError.
        """
        if (why := refusal_of(spec)) is not None:
            raise StartError("ModelInvalid", f"{why}; take --executor torch")
        self._library, self.level = load_library(level)
        self._spec = spec
        self._profile = Profile()
        self._slots = slots
        self.threads = max(1, threads)
        self._engine = self._library.rf_create(ctypes.byref(_describe(spec, slots=slots, int8=int8)), threads)
        if not self._engine:
            raise MemoryError(f"no memory for the weights, or for {threads - 1} more threads")
        self._load(weights)
        page_bytes = self._library.rf_page_bytes(self._engine)
        if self._library.rf_reserve(self._engine, num_pages) != OK:
            raise MemoryError(f"no memory for {num_pages} pages of {page_bytes} bytes")
        memory = (ctypes.c_uint8 * (num_pages * page_bytes)).from_address(self._library.rf_pages(self._engine))
        self._pages = np.frombuffer(memory, np.uint8).reshape(num_pages, page_bytes)
        self._layout = KvLayout(
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            page_bytes=page_bytes,
            layers=len(spec.layers),
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            dtype="bfloat16",
            layout=LAYOUT,
        )
        self._pending: tuple[StepInput, _StepCall] | None = None  # a `forward` whose `sample` has not come

    def close(self) -> None:
        """Gives memory and threads back. Nothing else may be called afterwards."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._pages = np.empty((0, 0), np.uint8)
            self._library.rf_destroy(engine)

    def __del__(self) -> None:
        self.close()

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def profile(self) -> Profile:
        return self._profile

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    def step(self, batch: StepInput, sampling: Sampling) -> StepOutput:
        """See Executor.step."""
        self._pending = None
        call = _StepCall(batch, self._spec)
        draw = _SamplingCall(batch, call.failed, sampling, self._spec.vocab_size)
        self._check(self._library.rf_step_and_sample(self._engine, ctypes.byref(call.desc), ctypes.byref(draw.desc)), batch)
        return _output(call, draw)

    def forward(self, batch: StepInput) -> None:
        """See Executor.forward."""
        self._pending = None
        call = _StepCall(batch, self._spec)
        self._check(self._library.rf_forward(self._engine, ctypes.byref(call.desc)), batch)
        self._pending = batch, call

    def sample(self, sampling: Sampling) -> StepOutput:
        """See Executor.sample."""
        assert self._pending is not None, "sample without forward"
        (batch, call), self._pending = self._pending, None
        draw = _SamplingCall(batch, call.failed, sampling, self._spec.vocab_size)
        self._check(self._library.rf_sample(self._engine, ctypes.byref(draw.desc)), batch)
        return _output(call, draw)

    def logits(self, batch: StepInput) -> F32:
        """Computes a step without drawing: [rows with `sample`, vocab] float32. Called by tests."""
        self.forward(batch)
        self._pending = None
        stride = ctypes.c_int64()
        data = self._library.rf_logits(self._engine, ctypes.byref(stride))
        rows = int(batch.sample.sum())
        return np.ctypeslib.as_array(data, (rows, stride.value))[:, : self._spec.vocab_size].copy()

    def profile_steps(self, *, on: bool) -> npt.NDArray[np.uint64]:
        """Starts or ends counting where cycles go; returns what was counted since: [threads, kinds of phases, (at work, waiting)]."""
        out = np.zeros((self.threads, len(KINDS), 2), np.uint64)
        self._library.rf_profile(self._engine, on, address(out))
        return out

    def read_page(self, page: int) -> bytes:
        """See Executor.read_page."""
        return bytes(self._pages[self._checked(page)].data)

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """See Executor.write_page. Raises ValueError for another length than a page's."""
        view = memoryview(data).cast("B")
        if len(view) != self._layout.page_bytes:
            raise ValueError(f"page {page}: got {len(view)} bytes, a page has {self._layout.page_bytes}")
        memoryview(self._pages[self._checked(page)])[:] = view

    def poison(self, pages: Sequence[int]) -> None:
        """See Executor.poison: NaN."""
        for page in pages:
            self._pages[self._checked(page)].view(np.uint16)[:] = _POISON

    def warm_up(self, *, max_step_tokens: int, max_rows: int, context_length: int) -> None:
        """Runs a chunk and a few decode steps, which measures the profile; the pages are as new afterwards."""
        limits = {"max_step_tokens": max_step_tokens, "max_rows": max_rows, "context_length": context_length}
        self._profile = measured(self.step, num_pages=self.layout.num_pages, **limits)
        self._library.rf_forget(self._engine)

    def _load(self, weights: Weights) -> None:
        for layer, number, name in weight_names(self._spec):
            source = weights.get(name)
            if source.dtype == np.uint16:
                dtype = DTYPE_BF16
            else:
                dtype, source = DTYPE_F32, source.astype(np.float32, copy=False)
                if self._spec.norm_offset and name.rpartition(".")[2] in _NORMS:
                    source = source + np.float32(self._spec.norm_offset)
            if dtype == DTYPE_BF16 and self._spec.norm_offset and name.rpartition(".")[2] in _NORMS:
                dtype, source = DTYPE_F32, (source.astype(np.uint32) << 16).view(np.float32) + np.float32(self._spec.norm_offset)
            source = np.ascontiguousarray(source)
            if self._library.rf_put(self._engine, layer, number, address(source), dtype) != OK:
                raise MemoryError(f"no memory for the weight {name}")
            weights.release(name)

    def _checked(self, page: int) -> int:
        if not 0 <= page < self._layout.num_pages:
            raise IndexError(f"page {page} of {self._layout.num_pages}")
        return page

    def _check(self, status: int, batch: StepInput) -> None:
        if status == BAD_PAGE:
            raise IndexError(
                f"a page table, position or slot does not fit {self._layout.num_pages} pages, {self._slots} slots and contexts "
                f"of {batch.context_lens.tolist()}"
            )
        if status == NO_MEMORY:
            raise MemoryError("no memory for a step; lower --max-step-tokens or --max-rows")
        assert status != NO_FORWARD, "sample without forward"


def weight_names(spec: ModelSpec) -> list[tuple[int, int, str]]:
    """Each weight of a model: (layer or -1, its number for the library, its name), as models.spec lists them. Pure."""
    absent = set()
    absent |= set() if spec.qkv_bias else {"q_bias", "k_bias", "v_bias"}
    absent |= set() if spec.o_bias else {"o_bias"}
    absent |= set() if spec.mlp_bias else {"gate_bias", "up_bias", "down_bias"}
    absent |= set() if spec.qk_norm else {"q_norm", "k_norm"}
    absent |= set() if spec.post_norms else {"attention_post_norm", "mlp_post_norm"}
    model = [(-1, i, name) for i, name in enumerate(MODEL_WEIGHTS) if not (spec.tied and name == "head")]
    return model + [(k, i, f"{k}.{name}") for k in range(len(spec.layers)) for i, name in enumerate(LAYER_WEIGHTS) if name not in absent]


def weight_bytes(spec: ModelSpec, *, int8: bool) -> int:
    """Memory of the packed weights, about (padding and norms are little)."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * q + 2 * kv + 3 * spec.intermediate_size)
    numbers = layer * len(spec.layers) + spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    return numbers if int8 else 2 * numbers


def _describe(spec: ModelSpec, *, slots: int, int8: bool) -> ModelDesc:
    """The model for the library. It copies what the struct points to; the arrays hang on the struct until then."""
    windows = np.array([layer.window for layer in spec.layers], np.int32)
    ropes = np.array([layer.rope for layer in spec.layers], np.int32)
    inv_freq = np.ascontiguousarray(np.stack([rope.inv_freq for rope in spec.ropes]), np.float32)
    factors = np.array([rope.factor for rope in spec.ropes], np.float32)
    desc = ModelDesc(
        vocab=spec.vocab_size,
        hidden=spec.hidden_size,
        inter=spec.intermediate_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        layers=len(spec.layers),
        ropes=len(spec.ropes),
        tied=spec.tied,
        qk_norm=spec.qk_norm,
        post_norms=spec.post_norms,
        gelu=spec.activation == "gelu_tanh",
        int8=int8,
        slots=slots,
        norm_eps=spec.norm_eps,
        attention_scale=spec.attention_scale,
        embedding_scale=spec.embedding_scale,
        attention_softcap=spec.attention_softcap,
        logit_softcap=spec.logit_softcap,
        windows=address(windows),
        layer_ropes=address(ropes),
        inv_freq=address(inv_freq),
        rope_factors=address(factors),
    )
    desc.arrays = (windows, ropes, inv_freq, factors)
    return desc


class _StepCall:
    """The arguments of one forward, and the arrays its results come in. Keeps all of them alive."""

    def __init__(self, batch: StepInput, spec: ModelSpec) -> None:
        rows = len(batch.context_lens)
        i32 = np.int32
        self.pool = batch.pool
        pooled = 0 if batch.pool is None else int((batch.pool != POOL_NONE).sum())
        self.places = _Places(batch, spec.vocab_size)
        self._block = Block(
            (
                ("token_ids", batch.token_ids, i32),
                ("positions", batch.positions, i32),
                ("row_starts", batch.row_starts, i32),
                ("context_lens", batch.context_lens, i32),
                ("page_tables", batch.page_tables, i32),
                ("sample", batch.sample, np.uint8),
                ("slots", batch.slots, i32),
                ("pool", batch.pool, np.int8),
            ),
            (("failed", rows, np.uint8), ("pooled", pooled * spec.hidden_size, np.float32)),
        )
        self.failed = self._block["failed"]
        self.pooled = self._block["pooled"].reshape(pooled, spec.hidden_size)
        self.desc = StepDesc(
            rows=rows,
            tokens=len(batch.token_ids),
            table_width=batch.page_tables.shape[1],
            places=self.places.count,
            **self._block.addresses(),
            **{name: address(array) for name, array in self.places.arrays().items()},
        )


class _Places:
    """Where prompt logprobs are wanted: each new token of an asking row that has a next one."""

    def __init__(self, batch: StepInput, vocab: int) -> None:
        self.count = 0
        self.wanted: list[tuple[int, int]] = []  # (row, k)
        if batch.prompt_logprobs is None or not (batch.prompt_logprobs >= 0).any():
            return
        assert batch.next_ids is not None
        self._k = fitting(np.minimum(batch.prompt_logprobs, vocab), np.int32)
        self._next = fitting(batch.next_ids, np.int32)
        assert self._k is not None and self._next is not None
        of_token = np.concatenate([[0], np.cumsum(self._next >= 0)])
        counts = of_token[batch.row_starts[1:]] - of_token[batch.row_starts[:-1]]
        counts = np.where(self._k >= 0, counts, 0)
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._tops = np.concatenate([[0], np.cumsum(counts * np.maximum(self._k, 0))]).astype(np.int64)
        self.count = int(self._starts[-1])
        self.wanted = [(int(r), int(self._k[r])) for r in np.flatnonzero(self._k >= 0)]
        self._chosen = np.zeros(self.count, np.float32)
        self._ids = np.zeros(int(self._tops[-1]), np.int32)
        self._values = np.zeros(int(self._tops[-1]), np.float32)

    def arrays(self) -> dict[str, Array | None]:
        """By the names of rf_step."""
        if not self.wanted:
            return {}
        return {
            "prompt_logprobs": self._k,
            "next_ids": self._next,
            "place_starts": self._starts,
            "top_starts": self._tops,
            "chosen": self._chosen,
            "top_ids": self._ids,
            "top_values": self._values,
        }

    def results(self) -> dict[int, TopLogprobs]:
        """By row."""
        out = {}
        for row, k in self.wanted:
            place, top = slice(self._starts[row], self._starts[row + 1]), slice(self._tops[row], self._tops[row + 1])
            count = int(self._starts[row + 1] - self._starts[row])
            out[row] = TopLogprobs(self._chosen[place], self._ids[top].reshape(count, k), self._values[top].reshape(count, k))
        return out


class _SamplingCall:
    """The arguments of one draw, and the arrays its results come in. Keeps all of them alive."""

    def __init__(self, batch: StepInput, failed: npt.NDArray[np.uint8], sampling: Sampling, vocab: int) -> None:
        f32, i32 = np.float32, np.int32
        self.rows = batch.sample.nonzero()[0]
        self.k, self.tops, tops = None, None, 0
        if sampling.logprobs is not None:
            self.k = np.minimum(sampling.logprobs, vocab).astype(i32)
            self.tops = np.concatenate([[0], np.cumsum(np.maximum(self.k, 0))])
            tops = int(self.tops[-1])
        self._block = Block(
            (
                ("temperature", sampling.temperature, f32),
                ("top_k", sampling.top_k, i32),
                ("top_p", sampling.top_p, f32),
                ("min_p", sampling.min_p, f32),
                ("seed", sampling.seed, np.uint64),
                ("logprobs", self.k, i32),
                ("bias_starts", sampling.bias_starts, i32),
                ("bias_ids", sampling.bias_ids, i32),
                ("bias_values", sampling.bias_values, f32),
                ("count_starts", sampling.count_starts, i32),
                ("count_ids", sampling.count_ids, i32),
                ("counts", sampling.counts, i32),
                ("repetition", sampling.repetition, f32),
                ("frequency", sampling.frequency, f32),
                ("presence", sampling.presence, f32),
                ("masks", sampling.masks, np.uint32),
                ("mask_rows", sampling.mask_rows, i32),
                ("top_starts", self.tops, np.int64),
            ),
            (("tokens", len(batch.sample), i32), ("chosen", len(self.rows), f32), ("top_ids", tops, i32), ("top_values", tops, f32)),
        )
        self.tokens, self.chosen = self._block["tokens"], self._block["chosen"]
        self.top_ids, self.top_values = self._block["top_ids"], self._block["top_values"]
        self._failed = failed
        self.desc = SamplingDesc(
            rows=len(self.rows),
            mask_words=0 if sampling.masks is None else sampling.masks.shape[1],
            failed=address(failed),
            **self._block.addresses(),
        )

    def logprobs(self) -> dict[int, TopLogprobs]:
        """By row of the step."""
        if self.k is None or self.tops is None:
            return {}
        out = {}
        for i in np.flatnonzero(self.k >= 0):
            top = slice(self.tops[i], self.tops[i + 1])
            out[int(self.rows[i])] = TopLogprobs(self.chosen[i : i + 1], self.top_ids[top][None], self.top_values[top][None])
        return out


def _of_good(found: dict[int, _T], failed: Bools) -> dict[int, _T]:
    if not found:
        return found
    return {row: value for row, value in found.items() if not failed[row]}


def _output(call: _StepCall, draw: _SamplingCall) -> StepOutput:
    pooled = {}
    if call.pool is not None:
        pooled = {int(row): call.pooled[i] for i, row in enumerate(np.flatnonzero(call.pool != POOL_NONE))}
    failed = call.failed.view(np.bool_)
    return StepOutput(draw.tokens, failed, _of_good(draw.logprobs(), failed), _of_good(call.places.results(), failed), _of_good(pooled, failed))


def load_native_executor(flags: RuntimeLaunch, folder: Path, threads: int, progress: Progress) -> NativeExecutor:
    """Loads a model folder, reserves its KV pages, warms up. Raises StartError(ModelInvalid | OutOfMemory | BadFlag), NoLibrary."""
    start = time.monotonic()
    spec = spec_of(folder, read_config(folder))
    int8 = flags.weight_dtype == "int8"
    if flags.context_length > spec.max_context:
        raise StartError(
            "BadFlag",
            f"--context-length is {flags.context_length}, the model was made for at most {spec.max_context} tokens "
            "(max_position_embeddings in its config.json); lower it",
        )
    check_memory(weight_bytes(spec, int8=int8), flags.kv_cache_memory, memory_limit_bytes())
    page_bytes = len(spec.layers) * 2 * spec.kv_heads * spec.head_dim * PAGE_SIZE * 2
    num_pages = pages_in(flags.kv_cache_memory, page_bytes, flags.context_length)
    try:
        with open_weights(folder, spec, progress) as weights:
            executor = NativeExecutor(spec, weights, num_pages=num_pages, slots=flags.max_rows, threads=threads, int8=int8)
    except MemoryError as e:
        raise StartError("OutOfMemory", f"cannot allocate weights and KV cache ({e}); lower --kv-cache-memory or use a smaller model") from e
    loaded = time.monotonic()
    progress(100, "warming up")
    executor.warm_up(max_step_tokens=flags.max_step_tokens, max_rows=flags.max_rows, context_length=flags.context_length)
    _log.info(
        "native executor ready: kernels %s, %s weights of %d MiB, %d threads, KV pages for %d tokens (%d bytes a token); "
        "packed in %.1f s, warmed up in %.1f s",
        executor.level, "int8" if int8 else "bfloat16", weight_bytes(spec, int8=int8) >> 20, threads, num_pages * PAGE_SIZE,
        page_bytes // PAGE_SIZE, loaded - start, time.monotonic() - loaded,
    )  # fmt: skip
    return executor


__all__ = ["LAYOUT", "NativeExecutor", "NoLibrary", "Weights", "load_native_executor", "refusal_of"]
