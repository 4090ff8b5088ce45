"""Random Llama folders of a few kB, and batches for an executor; used by the runtime's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from fleet_runtime.engine.base import Sampling, StepInput, greedy
from fleet_testing.tiny_models import make_model


def make_llama(folder: Path, **overrides: Any) -> PreTrainedModel:
    """A random Llama with logits around 10; see `make_model`."""
    return make_model(folder, "LlamaForCausalLM", **{"initializer_range": 0.3, **overrides})


@dataclass
class Row:
    """New tokens of one row: `ids[start:end]`, its context before `start` being in `pages` already."""

    ids: Sequence[int]
    pages: Sequence[int]
    start: int = 0
    end: int | None = None
    sample: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    new: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.end = len(self.ids) if self.end is None else self.end
        self.new = list(self.ids[self.start : self.end])


def make_batch(rows: Sequence[Row]) -> StepInput:
    """Flat arrays of the rows; unused entries of page tables hold a page number that does not exist."""
    width = max(len(r.pages) for r in rows)
    counts = [len(r.new) for r in rows]
    return StepInput(
        token_ids=np.array([t for r in rows for t in r.new], np.int32),
        positions=np.concatenate([np.arange(r.start, r.start + n, dtype=np.int32) for r, n in zip(rows, counts, strict=True)]),
        row_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array([r.start + n for r, n in zip(rows, counts, strict=True)], np.int32),
        page_tables=np.array([[*r.pages, *[1 << 30] * (width - len(r.pages))] for r in rows], np.int32),
        sample=np.array([r.sample for r in rows], np.bool_),
        slots=np.arange(len(rows), dtype=np.int32),
    )


def make_step(rows: Sequence[Row]) -> tuple[StepInput, Sampling]:
    """The rows' arrays, and how they draw."""
    drawn = [r for r in rows if r.sample]
    sampling = greedy(len(drawn))
    sampling.temperature = np.array([r.temperature for r in drawn], np.float32)
    sampling.top_p = np.array([r.top_p for r in drawn], np.float32)
    sampling.seed = np.array([r.seed for r in drawn], np.uint64)
    return make_batch(rows), sampling
