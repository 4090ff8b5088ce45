"""What a step of the torch executor gives beside tokens: logprobs, logprobs of prompts, pooled vectors; and the relay between steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from fleet_runtime.engine.base import POOL_LAST, POOL_NONE, POOL_SUM, greedy
from fleet_runtime.engine.torch_executor import TorchExecutor
from fleet_testing.executors import random_ids, torch_executor
from fleet_testing.oracle import oracle_logits
from fleet_testing.tiny_llama import Row, make_batch, make_step

CLOSE = 5e-4
PAGES = [9, 2, 30, 4, 17, 5, 6, 7]


@pytest.fixture(scope="module")
def executor(tiny: Path) -> TorchExecutor:
    return torch_executor(tiny)


def logprobs_of(folder: Path, ids: list[int]) -> np.ndarray:
    """[len(ids), vocab], of the next token at each position."""
    out: np.ndarray = torch.log_softmax(oracle_logits(folder, ids).double(), dim=-1).numpy()
    return out


@pytest.mark.parametrize("cuts", [[100], [1, 33, 34, 99, 100], [16, 64, 80, 100]])
def test_prompt_logprobs_join_over_chunks_to_those_of_transformers(tiny: Path, executor: TorchExecutor, cuts: list[int]) -> None:
    ids, k = random_ids(100, 4), 4
    expected = logprobs_of(tiny, ids)
    chosen, tops, values = [], [], []
    for start, end in zip([0, *cuts], cuts, strict=False):
        batch = make_batch([Row(ids[:50], [40, 41, 42, 43]), Row(ids, PAGES, start, end, sample=False)])
        batch.prompt_logprobs = np.array([-1, k], np.int32)
        batch.next_ids = np.concatenate([np.full(50, -1), np.array([*ids[1:], -1])[start:end]]).astype(np.int32)
        out = executor.step(batch, greedy(1))
        assert list(out.prompt_logprobs) == [1] and not out.failed.any()
        chosen.append(out.prompt_logprobs[1].chosen)
        tops.append(out.prompt_logprobs[1].ids)
        values.append(out.prompt_logprobs[1].values)
    np.testing.assert_allclose(np.concatenate(chosen), expected[np.arange(99), ids[1:]], atol=CLOSE)
    order = np.argsort(-expected[:99], axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(np.concatenate(tops), order)
    np.testing.assert_allclose(np.concatenate(values), np.take_along_axis(expected[:99], order, axis=1), atol=CLOSE)


def test_logprobs_of_drawn_tokens_are_those_of_transformers_whatever_the_temperature(tiny: Path, executor: TorchExecutor) -> None:
    ids = random_ids(40, 2)
    expected = logprobs_of(tiny, ids)[-1]
    batch, how = make_step([Row(ids, PAGES[:3], temperature=t, seed=7) for t in (0.0,)])
    how.logprobs = np.array([3], np.int32)
    for temperature in (0.0, 1.5):
        how.temperature = np.array([temperature], np.float32)
        out = executor.step(batch, how)
        found, token = out.logprobs[0], int(out.tokens[0])
        np.testing.assert_allclose(found.chosen, [expected[token]], atol=CLOSE)
        assert found.ids[0].tolist() == np.argsort(-expected)[:3].tolist()
        assert temperature or token == found.ids[0, 0]


def test_pooled_vectors_are_the_last_hidden_states_of_transformers(tiny: Path, executor: TorchExecutor) -> None:
    ids = random_ids(60, 3)
    model = AutoModel.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    assert executor.hidden_size == hidden.shape[1]
    executor.step(make_batch([Row(ids, [0, 1, 3, 8], 0, 20, sample=False)]), greedy(0))
    batch = make_batch([Row(ids, PAGES[:4], sample=False), Row(ids, [0, 1, 3, 8], 20, sample=False), Row(ids, [20, 21, 22, 23])])
    batch.pool = np.array([POOL_LAST, POOL_SUM, POOL_NONE], np.int8)
    out = executor.step(batch, greedy(1))
    assert sorted(out.pooled) == [0, 1] and out.pooled[0].dtype == np.float32
    np.testing.assert_allclose(out.pooled[0], hidden[-1], atol=CLOSE)
    np.testing.assert_allclose(out.pooled[1], hidden[20:].sum(axis=0), atol=50 * CLOSE)


def test_a_row_that_read_poison_gives_no_vector_and_no_logprobs(tiny: Path) -> None:
    executor, ids = torch_executor(tiny), random_ids(40)
    batch = make_batch([Row(ids, [0, 1, 2], 20, sample=False), Row(ids, [3, 4, 5], sample=False)])  # nobody wrote the first 20
    batch.pool = np.array([POOL_SUM, POOL_SUM], np.int8)
    batch.prompt_logprobs = np.array([1, 1], np.int32)
    batch.next_ids = np.array([*ids[21:], -1, *ids[1:], -1], np.int32)
    executor.poison([0])
    out = executor.step(batch, greedy(0))
    assert out.failed.tolist() == [True, False] and list(out.pooled) == [1] and list(out.prompt_logprobs) == [1]


def test_a_token_that_the_step_before_drew_comes_through_the_relay(tiny: Path, executor: TorchExecutor) -> None:
    ids = random_ids(30, 8)
    first, how = make_step([Row(ids, [10, 11]), Row(ids[:9], [12])])
    first.slots = np.array([7, 3], np.int32)
    drawn = executor.step(first, how).tokens
    second, how = make_step([Row([*ids[:9], -1 - 3], [12], 9), Row([*ids, -1 - 7], [10, 11], 30)])
    second.slots = np.array([3, 7], np.int32)
    executor.forward(second)  # split: the draw comes later
    out = executor.sample(how)
    for token, text in zip(out.tokens, ([*ids[:9], int(drawn[1])], [*ids, int(drawn[0])]), strict=True):
        assert token == int(oracle_logits(tiny, text)[-1].argmax())


def test_a_row_that_fails_leaves_nothing_in_the_relay(executor: TorchExecutor) -> None:
    ids = random_ids(10)
    batch, how = make_step([Row(ids, [50])])
    how.masks, how.mask_rows = np.zeros((1, 10), np.uint32), np.zeros(1, np.int32)
    assert executor.step(batch, how).failed.tolist() == [True]
    assert executor.step(*make_step([Row([*ids, -1], [50], 10)])).failed.tolist() == [True]
