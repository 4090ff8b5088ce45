"""The sampler against a naive one that sorts the whole vocabulary, and its independence of batch and neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet_runtime.engine.sampler import gumbel, nucleus, sample

Array = np.ndarray[Any, Any]


def draw(logits: Array, *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0, position: int = 0) -> int:
    tokens, failed = sample(
        np.asarray(logits, np.float32)[None], np.array([temperature], np.float32), np.array([top_p], np.float32),
        np.array([seed], np.uint64), np.array([position], np.int32),
    )  # fmt: skip
    assert not failed[0]
    return int(tokens[0])


def naive_nucleus(scores: Array, top_p: float) -> list[int]:
    """Sort everything by likelihood, lowest id first among equals; keep up to the token that crosses."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    total = sum(np.exp(scores[i]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += np.exp(scores[i])
        # A set whose mass is p up to rounding may go either way: such examples are left out.
        assume(abs(mass / total - top_p) > 1e-9)
        if mass / total >= top_p:
            break
    return sorted(kept)


flat_scores = hnp.arrays(np.float64, st.integers(1, 700), elements=st.sampled_from([0.0, -0.5, -1.0, -3.0, -9.0]))
any_scores = hnp.arrays(np.float64, st.integers(1, 700), elements=st.floats(-30, 0))


@settings(deadline=None)
@given(scores=st.one_of(flat_scores, any_scores), top_p=st.floats(0.001, 0.999))
@example(scores=np.zeros(700), top_p=0.5003)
@example(scores=np.concatenate([np.zeros(1), np.full(600, -1.0)]), top_p=0.0001)
def test_top_p_keeps_exactly_the_naive_set(scores: Array, top_p: float) -> None:
    scores = scores - scores.max()
    assert nucleus(scores, top_p).tolist() == naive_nucleus(scores, top_p)


def test_top_p_keeps_the_token_that_crosses() -> None:
    scores = np.log(np.array([0.5, 0.3, 0.2]))
    scores = scores - scores.max()
    assert nucleus(scores, 0.4).tolist() == [0]
    assert nucleus(scores, 0.6).tolist() == [0, 1]
    assert nucleus(scores, 0.9).tolist() == [0, 1, 2]


def test_a_set_whose_probability_is_exactly_p_is_enough() -> None:
    assert nucleus(np.zeros(4), 0.5).tolist() == [0, 1]
    assert nucleus(np.zeros(4), 0.25).tolist() == [0]


def test_excluded_tokens_are_never_drawn() -> None:
    logits = np.full(200, -np.inf)
    logits[[3, 150]] = 0.0
    assert {draw(logits, seed=s, top_p=p) for s in range(50) for p in (0.3, 0.99, 1.0)} == {3, 150}


@given(logits=hnp.arrays(np.float32, st.integers(1, 300), elements=st.sampled_from([0.0, 1.0, 2.0, -5.0])), seed=st.integers(0, 2**64 - 1))
def test_greedy_takes_the_lowest_id_of_the_highest(logits: Array, seed: int) -> None:
    best = next(i for i, x in enumerate(logits) if x == logits.max())
    assert draw(logits, temperature=0.0, seed=seed) == best
    assert draw(logits, temperature=5e-7, top_p=0.5, seed=seed) == best


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e4])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    token = draw(np.array([1000.0, -1000.0, 999.0]), temperature=temperature, top_p=0.9, seed=5)
    assert token in (0, 1, 2) and (temperature > 1 or token == 0)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_token_alone_and_among_any_others(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = (rng.standard_normal((n, 400)) * 3).astype(np.float32)
    temperature = rng.choice([0.0, 0.3, 1.0, 2.0], n).astype(np.float32)
    top_p = rng.choice([0.1, 0.9, 1.0], n).astype(np.float32)
    seed = rng.integers(0, 2**64, n, dtype=np.uint64)
    positions = rng.integers(0, 1 << 20, n).astype(np.int32)
    bad = data.draw(st.integers(0, n - 1))
    logits[bad, 17] = np.nan
    together, failed = sample(logits, temperature, top_p, seed, positions)
    assert failed.tolist() == [i == bad for i in range(n)]
    for i in range(n):
        if i != bad:
            alone, _ = sample(logits[i : i + 1], temperature[i : i + 1], top_p[i : i + 1], seed[i : i + 1], positions[i : i + 1])
            assert alone[0] == together[i]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_with_a_number_that_is_none_fails(value: float) -> None:
    logits = np.zeros((1, 50), np.float32)
    logits[0, 30] = value
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
    for temperature in (zeros, ones):
        _, failed = sample(logits, temperature, ones, np.zeros(1, np.uint64), np.zeros(1, np.int32))
        assert failed.tolist() == [True]


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    """Chi-square over 4,000 positions of one seed, and over 4,000 seeds of one position; fixed inputs, so no chance in it."""
    logits = np.array([2.0, 1.0, 0.0, -1.0, 3.0, -3.0, 0.5, 0.5])
    for temperature in (0.5, 1.0, 2.0):
        p = np.exp(logits / temperature)
        p /= p.sum()
        by_position = [draw(logits, temperature=temperature, seed=42, position=i) for i in range(4000)]
        by_seed = [draw(logits, temperature=temperature, seed=i, position=42) for i in range(4000)]
        for drawn in (by_position, by_seed):
            counts = np.bincount(drawn, minlength=8)
            chi2 = ((counts - 4000 * p) ** 2 / (4000 * p)).sum()
            assert chi2 < 24.3  # 99.9 % of a chi-square with 7 degrees of freedom


def test_renormalised_top_p_keeps_the_ratios_of_its_tokens() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    counts = np.bincount([draw(logits, top_p=0.65, seed=9, position=i) for i in range(4000)], minlength=4)
    assert counts[2] == counts[3] == 0
    assert abs(counts[0] / 4000 - 4 / 7) < 0.03


def test_noise_depends_on_seed_position_and_token_only() -> None:
    ids = np.arange(5000)
    base = gumbel(1, 2, ids)
    assert np.isfinite(base).all()
    np.testing.assert_array_equal(gumbel(1, 2, ids[100:200]), base[100:200])
    for other in (gumbel(2, 2, ids), gumbel(1, 3, ids), gumbel(2, 1, ids), gumbel(2**64 - 1, 2, ids), gumbel(1 + 2**32, 2, ids)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.06
    assert abs(base.mean() - 0.5772) < 0.06 and abs(base.var() - np.pi**2 / 6) < 0.15
