"""Torch executors over tiny models, and texts fed to them in chunks; used by the tests of models and executors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleet_runtime.engine.kv_pool import KvPool
from fleet_runtime.engine.torch_executor import TorchExecutor
from fleet_runtime.models.registry import load_model
from fleet_testing.tiny_llama import Row, make_batch


def torch_executor(folder: Path, *, num_pages: int = 64, dtype: torch.dtype = torch.float32) -> TorchExecutor:
    """An executor whose free pages are poisoned, so that any read of an unwritten number shows."""
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for one another
    model = load_model(folder, dtype=dtype, context_length=512, progress=lambda _p, _t: None)
    executor = TorchExecutor(model, KvPool(model.kv_shape, num_pages, dtype), slots=64)
    executor.poison(range(num_pages))
    return executor


def random_ids(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 300, n)]


def scrambled(n: int, seed: int = 0, num_pages: int = 64) -> list[int]:
    return [int(p) for p in np.random.default_rng(seed).permutation(num_pages)[:n]]


def pages_for(tokens: int) -> int:
    return -(-tokens // 16)


def run(executor: TorchExecutor, ids: list[int], pages: list[int], cuts: list[int]) -> dict[int, np.ndarray[Any, Any]]:
    """Feeds a text in chunks that end at `cuts`; logits after each chunk, by position."""
    out = {}
    for start, end in zip([0, *cuts], cuts, strict=False):
        out[end - 1] = executor.logits(make_batch([Row(ids, pages, start, end)]))[0]
    return out
