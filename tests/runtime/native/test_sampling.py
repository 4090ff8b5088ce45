"""Draws of the native executor against the numpy reference on the same logits: every option, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_runtime.engine import sampler
from fleet_runtime.engine.base import Sampling, StepInput, greedy
from fleet_runtime.engine.native_executor import NativeExecutor
from fleet_testing.tiny_llama import Row, make_batch
from fleet_testing.tiny_models import make_tiny

Make = Callable[..., NativeExecutor]
ROWS = 24
VOCAB = 2003  # no multiple of 32, more than is sorted at once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wide")
    make_tiny(out, "llama", head_dim=16, vocab_size=VOCAB)
    return out


def batch_of(rows: int = ROWS) -> StepInput:
    rng = np.random.default_rng(5)
    return make_batch([Row([int(t) for t in rng.integers(0, VOCAB, 3 + i % 5)], [i]) for i in range(rows)])


def options(seed: int, rows: int = ROWS) -> Sampling:
    """A bit of everything, other in each row."""
    rng = np.random.default_rng(seed)
    out = greedy(rows)
    out.temperature = rng.choice([0.0, 0.3, 1.0, 1.7, 30.0], rows).astype(np.float32)
    out.top_k = rng.choice([0, 1, 2, 40, 700, VOCAB, 5000], rows).astype(np.int32)
    out.top_p = rng.choice([1.0, 0.05, 0.5, 0.9, 0.99, 0.9999], rows).astype(np.float32)
    out.min_p = rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], rows).astype(np.float32)
    out.seed = rng.integers(0, 2**64, rows, dtype=np.uint64)
    out.logprobs = rng.choice([-1, 0, 1, 5, 20], rows).astype(np.int32)
    counts = rng.integers(0, 40, rows)
    out.bias_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    out.bias_ids = rng.integers(0, VOCAB, counts.sum()).astype(np.int32)
    out.bias_values = rng.choice([-np.inf, -5.0, 3.0, 10.0], counts.sum()).astype(np.float32)
    out.count_starts = (np.arange(rows + 1) * 50).astype(np.int32)
    out.count_ids = np.concatenate([rng.permutation(VOCAB)[:50] for _ in range(rows)]).astype(np.int32)
    out.counts = rng.integers(0, 4, rows * 50).astype(np.int32)
    out.repetition = rng.choice([1.0, 1.3, 0.8], rows).astype(np.float32)
    out.frequency = rng.choice([0.0, 0.7, -0.5], rows).astype(np.float32)
    out.presence = rng.choice([0.0, 1.5], rows).astype(np.float32)
    out.masks = rng.integers(0, 2**32, (3, -(-VOCAB // 32)), dtype=np.uint32)
    out.masks[1] &= out.masks[0] & out.masks[2]
    out.mask_rows = rng.integers(-1, 3, rows).astype(np.int32)
    return out


def compare(executor: NativeExecutor, sampling: Sampling, batch: StepInput) -> None:
    logits = executor.logits(batch)
    expected = sampler.sample(logits, sampling, batch.context_lens)
    got = executor.step(batch, sampling)
    assert got.failed.tolist() == expected.failed.tolist()
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert sorted(got.logprobs) == sorted(expected.logprobs)
    for row, found in got.logprobs.items():
        np.testing.assert_allclose(found.chosen, expected.logprobs[row].chosen, atol=2e-5)
        np.testing.assert_allclose(found.values, expected.logprobs[row].values, atol=2e-5)
        assert found.ids.tolist() == expected.logprobs[row].ids.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_all_options_together_draw_the_references_tokens(seed: int, level: str, folder: Path, make_native: Make) -> None:
    executor = make_native(folder, level=level)
    compare(executor, options(seed), batch_of())


@pytest.mark.parametrize("field", ["top_k", "top_p", "min_p", "none"])
def test_each_limit_alone_draws_the_references_tokens(field: str, folder: Path, make_native: Make) -> None:
    executor, batch = make_native(folder), batch_of()
    for seed in range(12):
        sampling = greedy(ROWS)
        sampling.temperature[:] = np.linspace(0.2, 3.0, ROWS)
        sampling.seed = np.random.default_rng(seed).integers(0, 2**64, ROWS, dtype=np.uint64)
        if field != "none":
            setattr(sampling, field, getattr(options(seed), field))
        compare(executor, sampling, batch)


def test_equal_logits_go_to_the_lowest_id(folder: Path, make_native: Make) -> None:
    executor, batch = make_native(folder), batch_of(4)
    for top_k in (0, 1, 7, 300, 1999):
        sampling = greedy(4)
        sampling.temperature[1:] = [0.5, 1.0, 2.0]
        sampling.top_k[:] = top_k
        sampling.top_p[2:] = 0.5
        sampling.bias_starts = (np.arange(5) * VOCAB).astype(np.int32)
        sampling.bias_ids = np.tile(np.arange(VOCAB), 4).astype(np.int32)
        sampling.bias_values = np.full(4 * VOCAB, 1e9, np.float32)  # float32 has no digits left for what was there
        compare(executor, sampling, batch)
        sampling.logprobs = np.full(4, 20, np.int32)
        assert all(found.ids.tolist() == [list(range(20))] for found in executor.step(batch, sampling).logprobs.values())


def test_few_tokens_that_may_be_drawn(folder: Path, make_native: Make) -> None:
    executor, batch = make_native(folder), batch_of(5)
    masks = np.zeros((5, -(-VOCAB // 32)), np.uint32)
    for row, ids in enumerate([[2002], [0, 31, 32], [5], [], [1000, 1001]]):
        for i in ids:
            masks[row, i // 32] |= np.uint32(1 << (i % 32))
    sampling = greedy(5)
    sampling.temperature[:] = [0.0, 1.0, 1.0, 1.0, 40.0]
    sampling.top_p[:] = 0.9
    sampling.top_k[:] = 50
    sampling.logprobs = np.full(5, 6, np.int32)
    sampling.masks, sampling.mask_rows = masks, np.arange(5, dtype=np.int32)
    compare(executor, sampling, batch)
    out = executor.step(batch, sampling)
    assert out.failed.tolist() == [False, False, False, True, False] and out.tokens[[0, 2]].tolist() == [2002, 5]


def test_draws_have_the_softmaxs_shares(folder: Path, make_native: Make) -> None:
    executor = make_native(folder)
    batch = make_batch([Row([3, 4, 5], [i]) for i in range(60)])
    found: list[Any] = []
    for i in range(40):
        sampling = greedy(60)
        sampling.temperature[:] = 1.0
        sampling.top_k[:] = 3
        sampling.seed = (np.arange(60) + 60 * i).astype(np.uint64)
        found += executor.step(batch, sampling).tokens.tolist()
    logits = executor.logits(make_batch([Row([3, 4, 5], [0])]))[0].astype(np.float64)
    top = np.argsort(-logits)[:3]
    shares = np.exp(logits[top] - logits[top].max())
    shares /= shares.sum()
    assert np.abs(np.array([found.count(int(t)) / len(found) for t in top]) - shares).max() < 0.05


def test_what_is_not_finite_fails_its_row_only(folder: Path, make_native: Make) -> None:
    executor = make_native(folder)
    batch = batch_of(4)
    batch.token_ids[batch.row_starts[1]] = VOCAB  # an id that does not exist
    sampling = options(1, 4)
    sampling.mask_rows = np.full(4, -1, np.int32)
    sampling.logprobs = np.full(4, 2, np.int32)
    good = executor.step(batch_of(4), sampling)
    out = executor.step(batch, sampling)
    assert out.failed.tolist() == [False, True, False, False] and sorted(out.logprobs) == [0, 2, 3]
    assert out.tokens[[0, 2, 3]].tolist() == good.tokens[[0, 2, 3]].tolist() and out.tokens[1] == 0
