"""The sampler against a naive one that sorts the whole vocabulary, and its independence of batch and neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet_runtime.engine.base import Sampling, greedy
from fleet_runtime.engine.sampler import GREEDY_BELOW, LOWEST_LOGPROB, adjusted, gumbel, kept, most_likely, nucleus, sample, top_logprobs

Array = np.ndarray[Any, Any]


def of_one(*, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0, **more: Any) -> Sampling:
    """The sampling of one row."""
    return Sampling(
        temperature=np.array([temperature], np.float32), top_k=np.array([top_k], np.int32), top_p=np.array([top_p], np.float32),
        min_p=np.array([min_p], np.float32), seed=np.array([seed], np.uint64), **more,
    )  # fmt: skip


def bias(pairs: dict[int, float]) -> dict[str, Array]:
    """Of one row: by token id."""
    return {
        "bias_starts": np.array([0, len(pairs)], np.int32),
        "bias_ids": np.array(list(pairs), np.int32),
        "bias_values": np.array(list(pairs.values()), np.float32),
    }


def counts(of: dict[int, int], *, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> dict[str, Array]:
    """Of one row: how often each token was in the answer; 0: only in the prompt."""
    return {
        "count_starts": np.array([0, len(of)], np.int32),
        "count_ids": np.array(list(of), np.int32),
        "counts": np.array(list(of.values()), np.int32),
        "repetition": np.array([repetition], np.float32),
        "frequency": np.array([frequency], np.float32),
        "presence": np.array([presence], np.float32),
    }


def mask(vocab: int, allowed: list[int]) -> dict[str, Array]:
    """Of one row."""
    words = np.zeros((1, -(-vocab // 32)), np.uint32)
    for i in allowed:
        words[0, i // 32] |= np.uint32(1 << (i % 32))
    return {"masks": words, "mask_rows": np.zeros(1, np.int32)}


def draw(logits: Array, *, position: int = 0, **how: Any) -> int:
    out = sample(np.asarray(logits, np.float32)[None], of_one(**how), np.array([position], np.int32))
    assert not out.failed[0]
    return int(out.tokens[0])


def together(rows: list[Sampling]) -> Sampling:
    """The sampling of several rows, each made by `of_one`."""
    out = greedy(0)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        setattr(out, name, np.concatenate([getattr(r, name) for r in rows]))
    out.logprobs = np.concatenate([np.array([-1], np.int32) if r.logprobs is None else r.logprobs for r in rows])
    lists = {"bias": ("bias_ids", "bias_values"), "count": ("count_ids", "counts")}
    for kind, names in lists.items():
        sizes = [0 if getattr(r, names[0]) is None else len(getattr(r, names[0])) for r in rows]
        setattr(out, f"{kind}_starts", np.cumsum([0, *sizes]).astype(np.int32))
        for name in names:
            setattr(out, name, np.concatenate([getattr(r, name) for r in rows if getattr(r, name) is not None] or [np.zeros(0, np.int32)]))
    for name, none in {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}.items():
        setattr(out, name, np.concatenate([np.array([none], np.float32) if getattr(r, name) is None else getattr(r, name) for r in rows]))
    masks = [r.masks for r in rows if r.masks is not None]
    if masks:
        out.masks, numbers = np.concatenate(masks), iter(range(len(masks)))
        out.mask_rows = np.array([-1 if r.masks is None else next(numbers) for r in rows], np.int32)
    return out


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


# Logits with ties, and without near-ties that rounding could turn round.
tied_logits = hnp.arrays(np.float32, st.integers(1, 120), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0, -3.0, -np.inf]))


def naive_adjusted(row: Array, how: Sampling) -> list[np.float32]:
    """Token by token."""
    out = [np.float32(x) for x in row]
    if how.bias_ids is not None and how.bias_values is not None:
        for i, value in zip(how.bias_ids, how.bias_values, strict=True):
            out[i] = np.float32(out[i] + value)
    if how.count_ids is not None and how.counts is not None and how.repetition is not None:
        assert how.frequency is not None and how.presence is not None
        for i, n in zip(how.count_ids, how.counts, strict=True):
            out[i] = out[i] / how.repetition[0] if out[i] > 0 else out[i] * how.repetition[0]
            out[i] = np.float32(out[i] - how.frequency[0] * np.float32(n))
            if n > 0:
                out[i] = np.float32(out[i] - how.presence[0])
    if how.masks is not None:
        for i in range(len(out)):
            if not int(how.masks[0, i // 32]) >> (i % 32) & 1:
                out[i] = np.float32(-np.inf)
    return out


def naive_token(row: Array, how: Sampling, position: int) -> int | None:
    """Sorts the whole vocabulary; None: the row fails."""
    logits = naive_adjusted(row, how)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if not np.isfinite(logits[order[0]]):
        return None
    if how.temperature[0] < GREEDY_BELOW:
        return order[0]
    scores = [(float(x) - float(logits[order[0]])) / float(how.temperature[0]) for x in logits]
    if how.top_k[0] > 0:
        order = order[: how.top_k[0]]
    if how.top_p[0] < 1:
        total, mass, cut = sum(np.exp(scores[i]) for i in order), 0.0, []
        for i in order:
            cut.append(i)
            mass += np.exp(scores[i])
            assume(abs(mass / total - float(how.top_p[0])) > 1e-9)
            if mass / total >= how.top_p[0]:
                break
        order = cut
    likely = [i for i in order if np.exp(scores[i]) >= float(how.min_p[0])]
    noise = gumbel(int(how.seed[0]), position, np.arange(len(logits)))
    return max(sorted(likely), key=lambda i: scores[i] + noise[i])


@st.composite
def rows(draw: st.DrawFn) -> tuple[Array, Sampling]:
    """A row's logits, and a sampling with any of its parts."""
    row = draw(tied_logits)
    ids = st.lists(st.integers(0, len(row) - 1), unique=True, max_size=6)
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        more |= bias({i: draw(st.sampled_from([-np.inf, -1.5, 0.25, 100.0])) for i in draw(ids)})
    if draw(st.booleans()):
        values = {
            "repetition": st.sampled_from([1.0, 1.3, 0.5]),
            "frequency": st.sampled_from([0.0, 0.7, -0.5]),
            "presence": st.sampled_from([0.0, 1.1]),
        }
        more |= counts({i: draw(st.integers(0, 3)) for i in draw(ids)}, **{name: draw(s) for name, s in values.items()})
    if draw(st.booleans()):
        more |= mask(len(row), draw(st.lists(st.integers(0, len(row) - 1), max_size=40)))
    how = of_one(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])), top_k=draw(st.sampled_from([0, 1, 2, 5, 200])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4, 0.01])), min_p=draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)), logprobs=np.array([draw(st.integers(-1, 5))], np.int32), **more,
    )  # fmt: skip
    return row, how


@settings(max_examples=300, deadline=None)
@given(case=rows(), position=st.integers(0, 1 << 20))
def test_any_row_draws_what_a_full_sort_draws(case: tuple[Array, Sampling], position: int) -> None:
    row, how = case
    before = row.copy()
    expected = naive_token(row, how, position)
    out = sample(row[None], how, np.array([position], np.int32))
    assert (None if out.failed[0] else int(out.tokens[0])) == expected
    np.testing.assert_array_equal(row, before)
    np.testing.assert_array_equal(adjusted(row, how, 0), np.array(naive_adjusted(row, how), np.float32))
    assert how.logprobs is not None
    if expected is None or how.logprobs[0] < 0:
        assert not out.logprobs
        return
    logits = np.array(naive_adjusted(row, how), np.float64)
    exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    order = sorted(range(len(row)), key=lambda i: (-logits[i], i))[: how.logprobs[0]]
    assert out.logprobs[0].ids[0].tolist() == order
    np.testing.assert_allclose(out.logprobs[0].values[0], np.maximum(exact[order], LOWEST_LOGPROB), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.logprobs[0].chosen[0], max(exact[expected], LOWEST_LOGPROB), rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(cases=st.lists(rows(), min_size=2, max_size=6), bad=st.integers(0, 5))
def test_a_row_draws_the_same_token_alone_and_among_any_others(cases: list[tuple[Array, Sampling]], bad: int) -> None:
    width = min(len(row) for row, _ in cases)
    cases = [(row[:width], how) for row, how in cases]
    assume(all(i < width for _, how in cases for ids in (how.bias_ids, how.count_ids) if ids is not None for i in ids))
    for _, how in cases:
        how.masks = None if how.masks is None else how.masks[:, : -(-width // 32)]
    logits, positions = np.stack([row for row, _ in cases]), np.arange(len(cases), dtype=np.int32)
    if bad < len(cases):
        logits[bad, 0] = np.nan
    out = sample(logits, together([how for _, how in cases]), positions)
    for i, (_, how) in enumerate(cases):
        alone = sample(logits[i : i + 1], how, positions[i : i + 1])
        assert out.tokens[i] == alone.tokens[0] and out.failed[i] == alone.failed[0] and (i in out.logprobs) == (0 in alone.logprobs)
    assert bad >= len(cases) or out.failed[bad]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_number_that_is_none_fails_though_a_mask_would_hide_it(value: float, temperature: float) -> None:
    logits = np.zeros((1, 50), np.float32)
    logits[0, 30] = value
    for more in ({}, mask(50, [1, 2])):
        assert sample(logits, of_one(temperature=temperature, **more), np.zeros(1, np.int32)).failed.tolist() == [True]


def test_a_mask_that_forbids_everything_fails_its_row_only() -> None:
    both = together([of_one(**mask(8, [])), of_one(**mask(8, [5])), of_one(**bias(dict.fromkeys(range(8), -np.inf)))])
    out = sample(np.zeros((3, 8), np.float32), both, np.zeros(3, np.int32))
    assert out.failed.tolist() == [True, False, True] and out.tokens[1] == 5


TABLE: dict[str, tuple[list[float], dict[str, Any], int]] = {
    "a bias lifts a token": ([2, 1, 0], bias({2: 3.0}), 2),
    "a bias of minus infinity forbids": ([2, 1, 0], bias({0: -np.inf}), 1),
    "repetition divides what is above 0": ([2.0, 1.5], counts({0: 0}, repetition=2.0), 1),
    "repetition multiplies what is below 0": ([-1.0, -1.5], counts({0: 0}, repetition=2.0), 1),
    "frequency counts the answer": ([2.0, 1.5], counts({0: 3}, frequency=0.25), 1),
    "frequency ignores the prompt": ([2.0, 1.5], counts({0: 0}, frequency=0.25), 0),
    "presence counts once": ([2.0, 1.5], counts({0: 3}, presence=0.4), 0),
    "presence ignores the prompt": ([2.0, 1.5], counts({0: 0}, presence=9.0), 0),
    "bias before repetition": ([1.0, 2.5], {**bias({0: 5.0}), **counts({0: 0}, repetition=2.0)}, 0),  # (1 + 5) / 2 = 3, not 1 / 2 + 5
    "repetition before presence": ([4.0, 1.6], counts({0: 1}, repetition=2.0, presence=0.5), 1),  # 4 / 2 - 0.5 = 1.5, not 3.5 / 2
    "a mask wins over a bias": ([0, 0, 0], {**bias({1: 100.0}), **mask(3, [0, 2])}, 0),
}


@pytest.mark.parametrize("name", list(TABLE))
def test_bias_penalties_and_mask_choose_the_greedy_token(name: str) -> None:
    logits, more, expected = TABLE[name]
    assert draw(np.array(logits), temperature=0.0, **more) == expected


KEPT: dict[str, tuple[dict[str, Any], list[int]]] = {  # of probabilities 0.4, 0.3, 0.2, 0.1
    "all": ({}, [0, 1, 2, 3]),
    "top_k": ({"top_k": 2}, [0, 1]),
    "top_k above the vocabulary": ({"top_k": 9}, [0, 1, 2, 3]),
    "top_p": ({"top_p": 0.65}, [0, 1]),
    "top_p of what top_k left": ({"top_k": 3, "top_p": 0.7}, [0, 1]),  # 0.7 of 0.9 is 0.63
    "min_p": ({"min_p": 0.45}, [0, 1, 2]),
    "min_p is relative to the most likely": ({"min_p": 0.2}, [0, 1, 2, 3]),
    "min_p of 1": ({"min_p": 1.0}, [0]),
    "all three": ({"top_k": 3, "top_p": 0.8, "min_p": 0.6}, [0, 1]),
    "a tiny top_p keeps one": ({"top_p": 1e-9}, [0]),
}


@pytest.mark.parametrize("name", list(KEPT))
def test_limits_keep_the_set_that_they_should(name: str) -> None:
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    how, expected = KEPT[name]
    assert kept(scores - scores.max(), **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **how}).tolist() == expected


@given(scores=flat_scores, k=st.integers(0, 800))
def test_the_most_likely_are_those_of_a_stable_sort(scores: Array, k: int) -> None:
    assert most_likely(scores, k).tolist() == sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def test_logprobs_are_of_the_masked_logits_before_temperature_and_never_infinite() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    how = of_one(temperature=0.1, top_k=1, logprobs=np.array([4], np.int32), **mask(4, [0, 1]))
    found = sample(logits[None], how, np.zeros(1, np.int32)).logprobs[0]
    assert found.ids[0].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(found.values[0], [np.log(2 / 3), np.log(1 / 3), LOWEST_LOGPROB, LOWEST_LOGPROB], rtol=1e-5)
    np.testing.assert_allclose(found.chosen, [np.log(2 / 3)], rtol=1e-5)
    assert top_logprobs(logits[None], np.array([2], np.int32), 99).ids.shape == (1, 4)  # cut to the vocabulary
    assert top_logprobs(logits[None], np.array([2], np.int32), 0).values.shape == (1, 0)


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


def test_a_bias_on_what_is_no_token_of_the_model_changes_nothing() -> None:
    """Ends of an answer come from the model's files, and `min_tokens` forbids them. Seen red: an id behind the vocabulary raised, and with that
    ended the worker; -1 (a config's word for none) forbade the last token."""
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    out = adjusted(logits, of_one(**bias({3: 5.0, 2**31 - 1: 5.0, -1: -np.inf, 1: 0.5})), 0)
    assert out.tolist() == [0.0, 1.5, 2.0]


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
