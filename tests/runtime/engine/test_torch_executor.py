"""The torch executor against transformers in float32, and against itself: batches, chunks, page tables, moved pages, poison."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_runtime.engine.paged_attention import decode_groups
from fleet_runtime.engine.profile import profile_of
from fleet_runtime.engine.torch_executor import TorchExecutor
from fleet_testing.executors import pages_for, random_ids, run, scrambled
from fleet_testing.oracle import oracle_logits
from fleet_testing.tiny_llama import Row, make_batch, make_llama, make_step

Make = Callable[..., TorchExecutor]
# Logits of the tiny models are around 10; float32 sums in another order differ by about 1e-5 of that.
CLOSE = 2e-4


def test_every_position_has_the_logits_of_transformers(tmp_path: Path, shape: dict[str, object], make_executor_of: Make) -> None:
    model = make_llama(tmp_path, **shape)
    ids, executor = random_ids(150), make_executor_of(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    got = run(executor, ids, scrambled(pages_for(150)), [100, *range(101, 151)])
    for position, logits in got.items():
        np.testing.assert_allclose(logits, expected[position], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("cuts", [[150], [16, 32, 150], [1, 2, 3, 17, 18, 64, 149, 150], [15, 31, 150], list(range(1, 151))])
def test_chunking_does_not_change_the_logits_beyond_rounding(tiny: Path, make_executor_of: Make, cuts: list[int]) -> None:
    ids = random_ids(150, 3)
    got = run(make_executor_of(tiny), ids, scrambled(10, 5), cuts)
    expected = oracle_logits(tiny, ids).numpy()
    for position, logits in got.items():
        np.testing.assert_allclose(logits, expected[position], atol=CLOSE, rtol=0)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_mix_of_rows_gives_each_row_its_own_logits(tiny: Path, shared_executor: TorchExecutor, data: st.DataObject) -> None:
    executor = shared_executor
    free = list(data.draw(st.permutations(range(64))))
    rows, expected = [], []
    for i in range(data.draw(st.integers(1, 6))):
        ids = random_ids(data.draw(st.integers(2, 120)), seed=i)
        pages = [free.pop() for _ in range(pages_for(len(ids)))]
        start = data.draw(st.integers(0, len(ids) - 1))
        if start:
            executor.logits(make_batch([Row(ids, pages, 0, start)]))
        rows.append(Row(ids, pages, start, sample=data.draw(st.booleans())))
        expected.append(oracle_logits(tiny, ids)[-1].numpy())
    got = executor.logits(make_batch(rows))
    wanted = [e for e, r in zip(expected, rows, strict=True) if r.sample]
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=CLOSE, rtol=0)
    executor.poison(range(64))


def test_a_cached_prefix_is_read_and_never_written(tiny: Path, make_executor_of: Make) -> None:
    executor, ids, pages = make_executor_of(tiny), random_ids(70), scrambled(6)
    executor.logits(make_batch([Row(ids, pages[:5])]))
    prefix = [executor.read_page(p) for p in pages[:4]]
    other = [*ids[:64], *random_ids(20, 9)]
    row = Row(other, [*pages[:4], 60, 61], start=64)
    np.testing.assert_allclose(executor.logits(make_batch([row]))[0], oracle_logits(tiny, other)[-1].numpy(), atol=CLOSE, rtol=0)
    assert [executor.read_page(p) for p in pages[:4]] == prefix


def test_the_same_step_gives_the_same_bits(tiny: Path, make_executor_of: Make) -> None:
    rows = [Row(random_ids(n, n), scrambled(64)[i * 8 : i * 8 + 8]) for i, n in enumerate([1, 90, 1, 33])]
    first, second = (make_executor_of(tiny).logits(make_batch(rows)) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_moved_to_another_executor_continue_with_the_same_bits(tiny: Path, make_executor_of: Make, dtype: torch.dtype) -> None:
    one, two = make_executor_of(tiny, dtype=dtype), make_executor_of(tiny, dtype=dtype)
    ids, here, there = random_ids(60), [3, 9, 1, 40], [50, 2, 63, 8]
    one.logits(make_batch([Row(ids, here, 0, 59)]))
    for a, b in zip(here, there, strict=True):
        data = one.read_page(a)
        assert len(data) == one.layout.page_bytes
        two.write_page(b, memoryview(data))
        assert two.read_page(b) == data
    a, b = one.logits(make_batch([Row(ids, here, 59)])), two.logits(make_batch([Row(ids, there, 59)]))
    assert np.isfinite(a).all() and a.tobytes() == b.tobytes()


def test_bfloat16_is_near_the_float32_logits(tiny: Path, make_executor_of: Make) -> None:
    ids, pages = random_ids(40), [1, 2, 3]
    got = make_executor_of(tiny, dtype=torch.bfloat16).logits(make_batch([Row(ids, pages)]))[0]
    expected = oracle_logits(tiny, ids)[-1].numpy()
    assert np.corrcoef(got, expected)[0, 1] > 0.99


def test_a_page_of_the_wrong_length_or_number_is_refused_and_nothing_changes(tiny: Path, make_executor_of: Make) -> None:
    executor = make_executor_of(tiny, num_pages=4)
    executor.logits(make_batch([Row(random_ids(20), [0, 1])]))
    before = [executor.read_page(p) for p in range(4)]
    with pytest.raises(ValueError, match="a page has"):
        executor.write_page(1, b"short")
    for page in (-1, 4):
        with pytest.raises(IndexError):
            executor.read_page(page)
        with pytest.raises(IndexError):
            executor.write_page(page, before[0])
        with pytest.raises(IndexError):
            executor.logits(make_batch([Row([1, 2], [page])]))
    assert [executor.read_page(p) for p in range(4)] == before


def test_a_poisoned_page_fails_its_row_and_no_other(tiny: Path, make_executor_of: Make) -> None:
    executor = make_executor_of(tiny)
    rows = [Row(random_ids(40, i), [4 * i, 4 * i + 1, 4 * i + 2]) for i in range(4)]
    executor.logits(make_batch([Row(r.ids, r.pages, 0, 39) for r in rows]))
    next_rows = [Row(r.ids, r.pages, 39, temperature=t) for r, t in zip(rows, [0.0, 0.0, 1.0, 1.0], strict=True)]
    good = executor.step(*make_step(next_rows))
    assert not good.failed.any()
    executor.poison([1 * 4 + 1, 2 * 4 + 1])
    bad = executor.step(*make_step(next_rows))
    assert bad.failed.tolist() == [False, True, True, False]
    assert bad.tokens[[0, 3]].tolist() == good.tokens[[0, 3]].tolist()


def test_a_page_freed_with_nan_is_clean_for_its_next_owner(tiny: Path, make_executor_of: Make) -> None:
    executor = make_executor_of(tiny)
    executor.poison(range(64))
    out = executor.step(*make_step([Row(random_ids(5), [7])]))
    assert not out.failed.any()


@pytest.mark.parametrize("unknown", [-1, 300, 2**31 - 1])
def test_an_id_outside_the_vocabulary_fails_its_row_and_what_follows_it_only(tiny: Path, make_executor_of: Make, unknown: int) -> None:
    executor, good = make_executor_of(tiny), random_ids(20)
    bad = [*good[:10], unknown, *good[11:]]
    out = executor.step(*make_step([Row(good, [0, 1]), Row(bad, [2, 3])]))
    assert out.failed.tolist() == [False, True] and out.tokens[0] == int(oracle_logits(tiny, good)[-1].argmax())
    assert executor.step(*make_step([Row([*bad, 5], [2, 3], 20)])).failed.tolist() == [True]


def test_rows_that_are_not_sampled_get_no_token(tiny: Path, make_executor_of: Make) -> None:
    executor, ids = make_executor_of(tiny), random_ids(30)
    out = executor.step(*make_step([Row(ids, [0, 1], sample=False), Row(ids, [2, 3])]))
    assert out.tokens[0] == 0 and out.tokens[1] == int(oracle_logits(tiny, ids)[-1].argmax())
    assert executor.step(*make_step([Row(ids, [0, 1], sample=False)])).failed.tolist() == [False]


def test_a_chunk_that_reads_or_writes_something_not_finite_fails_though_it_is_not_sampled(tiny: Path, make_executor_of: Make) -> None:
    executor, ids = make_executor_of(tiny), random_ids(48)
    executor.poison([0])
    bad, good = Row(ids, [0, 1, 2], 16, 32, sample=False), Row(ids, [3, 4, 5], 0, 32, sample=False)
    assert executor.step(*make_step([bad, good])).failed.tolist() == [True, False]
    unknown = [*ids[:7], -1, *ids[8:]]  # in the middle of the chunk
    assert executor.step(*make_step([Row(unknown, [6, 7], 0, 32, sample=False)])).failed.tolist() == [True]


def test_greedy_answers_in_a_batch_are_those_of_rows_alone(tiny: Path, make_executor_of: Make) -> None:
    """Token by token for eight rows that join one after the other; each token is the oracle's argmax outside a margin."""
    executor = make_executor_of(tiny)
    texts = [random_ids(5 + 7 * i, seed=i) for i in range(8)]
    pages = [scrambled(64)[i * 8 : i * 8 + 8] for i in range(8)]
    done = [0] * 8
    for step in range(24):
        live = range(min(8, step + 1))
        out = executor.step(*make_step([Row(texts[i], pages[i], done[i]) for i in live]))
        for i in live:
            done[i] = len(texts[i])
            texts[i].append(int(out.tokens[i]))
    for i, text in enumerate(texts):
        start = 5 + 7 * i
        logits = oracle_logits(tiny, text)[start - 1 : -1]
        top = logits.topk(2).values
        sure = top[:, 0] - top[:, 1] > CLOSE
        assert sure.float().mean() > 0.9
        assert (logits.argmax(-1) == torch.tensor(text[start:]))[sure].all()


def test_pages_can_be_copied_while_a_step_runs_on_others(tiny: Path, make_executor_of: Make) -> None:
    executor, stop = make_executor_of(tiny), threading.Event()
    data = bytes(range(256)) * (executor.layout.page_bytes // 256)
    broken: list[int] = []

    def copy() -> None:
        while not stop.is_set():
            executor.write_page(60, data)
            if executor.read_page(60) != data:
                broken.append(60)

    thread = threading.Thread(target=copy)
    thread.start()
    batch = make_batch([Row(random_ids(100), list(range(7)))])
    bits = {executor.logits(batch).tobytes() for _ in range(50)}
    stop.set()
    thread.join()
    assert len(bits) == 1 and not broken


@given(lengths=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 3)), max_size=40))
def test_decode_groups_hold_each_one_token_row_once_and_waste_little(lengths: list[tuple[int, int]]) -> None:
    context = np.array([c for c, _ in lengths], np.int32)
    counts = np.array([n for _, n in lengths], np.int32)
    groups = decode_groups(context, counts)
    assert sorted(int(r) for g in groups for r in g) == [i for i, (_, n) in enumerate(lengths) if n == 1]
    for g in groups:
        pages = -(-context[g] // 16)
        assert pages.max() <= 2 * pages.min()
    assert len(groups) <= 13  # powers of two up to the longest context


def test_a_profile_adds_up_to_what_was_measured() -> None:
    got = profile_of(chunk=128, rows=8, context=1024, chunk_s=0.25, one_s=0.04, rows_s=0.054, context_s=0.0605)
    assert got.prefill_tokens_per_s == 512 and got.step_per_row_s == pytest.approx(0.002) and got.step_base_s == pytest.approx(0.038)
    assert got.step_per_ctx_token_s == pytest.approx(0.0205 / 1023)


def test_a_disturbed_measurement_gives_a_profile_within_reason() -> None:
    for rows_s, context_s in [(0.001, 0.001), (9.0, 9.0)]:
        got = profile_of(chunk=1, rows=1, context=1, chunk_s=0.04, one_s=0.04, rows_s=rows_s, context_s=context_s)
        assert 0.02 <= got.step_base_s <= 0.04 and 0 <= got.step_per_row_s <= 0.02 and 0 <= got.step_per_ctx_token_s <= 0.04 / 512


def test_warm_up_measures_a_profile_and_leaves_the_executor_working(tiny: Path, make_executor_of: Make) -> None:
    executor = make_executor_of(tiny, num_pages=3)
    executor.warm_up(max_step_tokens=512, max_rows=64, context_length=512)
    profile = executor.profile
    assert profile.prefill_tokens_per_s > 0 and profile.step_base_s + profile.step_per_row_s > 0 and profile.step_per_ctx_token_s >= 0
    ids = random_ids(30)
    np.testing.assert_allclose(executor.logits(make_batch([Row(ids, [2, 0])]))[0], oracle_logits(tiny, ids)[-1].numpy(), atol=CLOSE, rtol=0)
