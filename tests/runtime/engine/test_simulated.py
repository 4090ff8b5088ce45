"""The simulated executor: what it makes up is deterministic, honours what a client asks for, and depends on nothing but the row's context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_contract.worker import Profile
from fleet_runtime.engine.base import NEVER_DRAWN, POOL_LAST, POOL_SUM, Sampling, StepOutput, greedy
from fleet_runtime.engine.sampler import LOWEST_LOGPROB
from fleet_runtime.engine.simulated import SimulatedExecutor
from fleet_testing.tiny_llama import Row, make_batch

IDS = [256, *b"The quick brown fox jumps over the lazy dog, and back."]


def fresh() -> SimulatedExecutor:
    return SimulatedExecutor(num_pages=32, profile=Profile(), sleep=lambda _s: None)


def masked(*allowed: int) -> Sampling:
    words = np.zeros((1, 9), np.uint32)
    for i in allowed:
        words[0, i // 32] |= np.uint32(1 << (i % 32))
    how = greedy(1)
    how.masks, how.mask_rows = words, np.zeros(1, np.int32)
    return how


def biased(pairs: dict[int, float]) -> Sampling:
    how = greedy(1)
    how.bias_starts = np.array([0, len(pairs)], np.int32)
    how.bias_ids, how.bias_values = np.array(list(pairs), np.int32), np.array(list(pairs.values()), np.float32)
    return how


def step(how: Sampling, ids: Sequence[int] = IDS) -> StepOutput:
    return fresh().step(make_batch([Row(ids, [3, 1, 2, 0])]), how)


PLAIN = int(step(greedy(1)).tokens[0])


def test_a_plain_row_draws_printable_text_and_asking_for_logprobs_changes_nothing() -> None:
    how = greedy(1)
    how.logprobs = np.array([5], np.int32)
    out = step(how)
    assert 32 <= PLAIN < 127 and out.tokens[0] == PLAIN
    found = out.logprobs[0]
    assert found.ids[0, 0] == PLAIN and found.values[0, 0] == found.chosen[0] and (np.diff(found.values[0]) <= 0).all()
    assert (found.values <= 0).all() and (found.values > LOWEST_LOGPROB).all() and all(32 <= i < 127 for i in found.ids[0])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (masked(257), 257),
        (masked(10, 65), 65),  # the printable one
        (masked(*range(260)), PLAIN),
        (biased({257: 100.0}), 257),
        (biased({PLAIN: 0.0}), PLAIN),
    ],
)
def test_masks_and_bias_decide_the_token(how: Sampling, expected: int) -> None:
    assert step(how).tokens[0] == expected


def test_a_forbidden_token_is_not_drawn_and_the_next_one_is_always_the_same() -> None:
    other = int(step(biased({PLAIN: -np.inf})).tokens[0])
    assert other != PLAIN and 32 <= other < 127
    assert step(masked(*(i for i in range(260) if i != PLAIN))).tokens[0] == other


def test_a_frequency_penalty_moves_away_from_what_was_said() -> None:
    how = greedy(1)
    how.count_starts, how.count_ids, how.counts = np.array([0, 1], np.int32), np.array([PLAIN], np.int32), np.array([40], np.int32)
    how.frequency = np.array([2.0], np.float32)
    assert step(how).tokens[0] != PLAIN


def test_a_mask_that_forbids_everything_fails_its_row_and_leaves_no_token_to_the_next_step() -> None:
    executor = fresh()
    out = executor.step(make_batch([Row(IDS, [3, 1, 2, 0])]), masked())
    assert out.failed.tolist() == [True]
    after = executor.step(make_batch([Row([*IDS, -1], [3, 1, 2, 0], len(IDS))]), greedy(1))
    assert after.failed.tolist() == [True] and NEVER_DRAWN < 0


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, len(IDS) - 1), unique=True), pool=st.sampled_from([POOL_LAST, POOL_SUM]))
def test_chunks_do_not_change_prompt_logprobs_or_pooled_vectors(cuts: list[int], pool: int) -> None:
    def run(ends: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        executor, chosen, top, vectors = fresh(), [], [], []
        for start, end in zip([0, *ends], ends, strict=False):
            batch = make_batch([Row(IDS, [3, 1, 2, 0], start, end, sample=end == len(IDS))])
            batch.prompt_logprobs, batch.pool = np.array([3], np.int32), np.array([pool], np.int8)
            batch.next_ids = np.array([*IDS[1:], -1], np.int32)[start:end]
            out = executor.step(batch, greedy(int(end == len(IDS))))
            chosen.append(out.prompt_logprobs[0].chosen)
            top.append(out.prompt_logprobs[0].ids)
            vectors.append(out.pooled[0])
        return np.concatenate(chosen), np.concatenate(top), vectors[-1] if pool == POOL_LAST else np.sum(vectors, axis=0)

    whole, chunks = run([len(IDS)]), run([*sorted(cuts), len(IDS)])
    assert whole[0].shape == (len(IDS) - 1,) and whole[1].shape == (len(IDS) - 1, 3) and whole[2].shape == (fresh().hidden_size,)
    for a, b in zip(whole, chunks, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (whole[0] < 0).all() and (whole[0] > LOWEST_LOGPROB).all()
