"""What the native executor computes, against transformers in float32 on weights rounded to bfloat16: every family, every level, both weight types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fleet_runtime.engine.base import POOL_LAST, POOL_SUM
from fleet_runtime.engine.native_executor import NativeExecutor
from fleet_testing.tiny_llama import Row, make_batch, make_step
from fleet_testing.tiny_models import TINY, make_model, make_tiny

Make = Callable[..., NativeExecutor]
F32 = npt.NDArray[np.float32]

# Largest relative error (root mean square of the difference over that of the logits). Weights are the same on both sides; what is rounded is
# the KV cache, int8 weights and inputs, and at level avx512bf16 every matrix's input. These models amplify more than trained ones do.
BOUND = {"avx512bf16": 0.03, "avx512": 0.02, "avx2": 0.02}
BOUND_INT8 = 0.08


def random_ids(n: int, seed: int = 0, vocab: int = 300) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, n)]


def scrambled(n: int, seed: int = 0, num_pages: int = 64) -> list[int]:
    return [int(p) for p in np.random.default_rng(seed).permutation(num_pages)[:n]]


def every_logit(executor: NativeExecutor, ids: list[int], *, prefill: int) -> F32:
    """Logits of positions from `prefill - 1` on: a chunk, then token by token."""
    pages = scrambled(-(-len(ids) // 16), num_pages=executor.layout.num_pages)
    out = [executor.logits(make_batch([Row(ids, pages, 0, prefill)]))[0]]
    out += [executor.logits(make_batch([Row(ids, pages, i, i + 1)]))[0] for i in range(prefill, len(ids))]
    return np.stack(out)


def error_of(got: F32, expected: F32) -> float:
    return float(np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()))


@torch.no_grad()
def rounded_logits(model: Any, ids: list[int]) -> F32:
    """The model's logits with all matrices rounded to bfloat16."""
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.copy_(weight.bfloat16().float())
    out: F32 = model(torch.tensor([ids])).logits[0].numpy()
    return out


@pytest.mark.parametrize("name", list(TINY))
def test_every_family_has_the_logits_of_transformers(name: str, level: str, tmp_path: Path, make_native: Make) -> None:
    model = make_tiny(tmp_path, name, head_dim=16)
    ids = random_ids(90)
    got = every_logit(make_native(tmp_path, level=level), ids, prefill=50)
    assert error_of(got, rounded_logits(model, ids)[49:]) < BOUND[level]


@pytest.mark.parametrize("head_dim", [16, 32, 48, 80, 128, 256])
def test_every_head_size_that_is_a_multiple_of_16(head_dim: int, level: str, tmp_path: Path, make_native: Make) -> None:
    model = make_tiny(tmp_path, "qwen3", head_dim=head_dim, num_attention_heads=3, num_key_value_heads=1)
    ids = random_ids(40)
    got = every_logit(make_native(tmp_path, level=level), ids, prefill=33)
    assert error_of(got, rounded_logits(model, ids)[32:]) < BOUND[level]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (6, 1), (16, 1), (12, 1), (48, 1)])
def test_any_number_of_query_heads_shares_a_kv_head(heads: int, kv_heads: int, tmp_path: Path, make_native: Make) -> None:
    model = make_model(tmp_path, "LlamaForCausalLM", head_dim=16, num_attention_heads=heads, num_key_value_heads=kv_heads)
    ids = random_ids(40)
    assert error_of(every_logit(make_native(tmp_path), ids, prefill=33), rounded_logits(model, ids)[32:]) < BOUND["avx512bf16"]


@pytest.mark.parametrize(("hidden", "inner", "vocab"), [(36, 35, 31), (66, 96, 320), (102, 17, 1000)])
def test_sizes_that_fill_no_vector(hidden: int, inner: int, vocab: int, level: str, tmp_path: Path, make_native: Make) -> None:
    model = make_model(tmp_path, "LlamaForCausalLM", head_dim=16, hidden_size=hidden, intermediate_size=inner, vocab_size=vocab)
    ids = random_ids(40, vocab=vocab)
    got = every_logit(make_native(tmp_path, level=level), ids, prefill=20)
    assert got.shape[1] == vocab and error_of(got, rounded_logits(model, ids)[19:]) < BOUND[level]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_int8_weights_are_near(name: str, level: str, tmp_path: Path, make_native: Make) -> None:
    model = make_tiny(tmp_path, name, head_dim=32)
    ids = random_ids(60)
    got = every_logit(make_native(tmp_path, level=level, int8=True), ids, prefill=40)
    assert error_of(got, rounded_logits(model, ids)[39:]) < BOUND_INT8


def test_long_contexts_are_merged_from_segments(tiny_native: Path, level: str, make_native: Make) -> None:
    from transformers import AutoModelForCausalLM

    ids = random_ids(1100)
    expected = rounded_logits(AutoModelForCausalLM.from_pretrained(tiny_native, dtype=torch.float32), ids)
    got = every_logit(make_native(tiny_native, num_pages=80, level=level), ids, prefill=1096)
    assert error_of(got, expected[1095:]) < BOUND[level]


@torch.no_grad()
def test_pooled_vectors_are_the_final_norms_output(tiny_native: Path, make_native: Make) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_native, dtype=torch.float32)
    ids = random_ids(30)
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    batch, sampling = make_step([Row(ids, [0, 1], sample=False), Row(ids, [2, 3]), Row(ids, [4, 5], sample=False)])
    batch.pool = np.array([POOL_LAST, 0, POOL_SUM], np.int8)
    executor = make_native(tiny_native)
    out = executor.step(batch, sampling)
    assert sorted(out.pooled) == [0, 2] and executor.hidden_size == 48
    assert error_of(out.pooled[0], hidden[-1]) < 0.04 and error_of(out.pooled[2], hidden.sum(0)) < 0.04


@torch.no_grad()
def test_prompt_logprobs_are_those_of_the_next_tokens_and_join_over_chunks(tiny_native: Path, make_native: Make) -> None:
    executor, ids = make_native(tiny_native), random_ids(70)

    def logprobs_of(cuts: list[int]) -> tuple[F32, npt.NDArray[np.int32], F32]:
        found = []
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            batch, sampling = make_step([Row(ids[:3], [60]), Row(ids, [0, 1, 2, 3, 4], start, end)])
            batch.prompt_logprobs = np.array([-1, 3], np.int32)
            batch.next_ids = np.array([-1, -1, -1, *ids[start + 1 : end + 1], *([-1] if end == len(ids) else [])], np.int32)
            found.append(executor.step(batch, sampling).prompt_logprobs[1])
        return np.concatenate([f.chosen for f in found]), np.concatenate([f.ids for f in found]), np.concatenate([f.values for f in found])

    chosen, top_ids, top_values = logprobs_of([])
    logits = np.stack([executor.logits(make_batch([Row(ids, [5, 6, 7, 8, 9], 0, n)]))[0] for n in range(1, 70)]).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(chosen, expected[np.arange(69), ids[1:]], atol=1e-4)
    assert (top_ids == np.argsort(-expected, axis=1, kind="stable")[:, :3]).all()
    np.testing.assert_allclose(top_values, np.take_along_axis(expected, top_ids, axis=1), atol=1e-4)
    for cuts in ([16], [1, 2, 33, 69]):
        for one, other in zip(logprobs_of(cuts), (chosen, top_ids, top_values), strict=True):
            assert one.tobytes() == other.tobytes()
