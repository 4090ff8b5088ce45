"""A row's bits depend on its own tokens alone: alone, in any batch, in any chunks, on any pages, with any threads (rule 1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_runtime.engine.native_executor import NativeExecutor
from fleet_testing.tiny_llama import Row, make_batch, make_step
from fleet_testing.tiny_models import make_tiny

Make = Callable[..., NativeExecutor]
PAGES = 200
TEXTS = 6


def text(i: int) -> list[int]:
    """Text i: 40 to 700 tokens, over several segments of attention."""
    rng = np.random.default_rng(100 + i)
    return [int(t) for t in rng.integers(0, 300, [40, 97, 256, 300, 530, 700][i])]


def pages_of(order: list[int], length: int) -> list[int]:
    return [order.pop() for _ in range(-(-length // 16))]


class Judge:
    """Logits of every text after its last token, computed alone and at once; executors with other threads to compare."""

    def __init__(self, folder: Path, make: Make, *, level: str, int8: bool) -> None:
        self.executors = [make(folder, num_pages=PAGES, threads=n, level=level, int8=int8) for n in (1, 2, 3)]
        self.expected = []
        for i in range(TEXTS):
            ids = text(i)
            self.expected.append(self.executors[0].logits(make_batch([Row(ids, list(range(-(-len(ids) // 16))))]))[0].tobytes())
        self.executors[0].poison(range(PAGES))


FAMILIES = [("llama", False), ("llama", True), ("gemma2", False), ("qwen3", False)]


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, bool, Make], Judge]:
    made: dict[tuple[str, str, bool], Judge] = {}

    def get(name: str, level: str, int8: bool, make: Make) -> Judge:
        if (name, level, int8) not in made:
            folder = tmp_path_factory.mktemp("model")
            make_tiny(folder, name, head_dim=16, max_position_embeddings=2048)
            made[name, level, int8] = Judge(folder, make, level=level, int8=int8)
        return made[name, level, int8]

    return get


@pytest.mark.parametrize(("name", "int8"), FAMILIES)
def test_any_batch_any_chunks_any_pages_any_threads(
    name: str, int8: bool, level: str, make_native: Make, judges: Callable[[str, str, bool, Make], Judge]
) -> None:
    judge = judges(name, level, int8, make_native)

    @settings(max_examples=12, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        executor = judge.executors[data.draw(st.integers(0, 2), "threads")]
        executor.poison(range(PAGES))
        order = [int(p) for p in np.random.default_rng(data.draw(st.integers(0, 1000), "pages")).permutation(PAGES)]
        chosen = data.draw(st.lists(st.integers(0, TEXTS - 1), min_size=1, max_size=4, unique=True), "texts")
        texts = [text(i) for i in chosen]
        tables = [pages_of(order, len(ids)) for ids in texts]
        done = [0] * len(texts)
        while any(d < len(ids) for d, ids in zip(done, texts, strict=True)):
            live = [i for i in range(len(texts)) if done[i] < len(texts[i])]
            rows = []
            for i in live:
                size = data.draw(st.one_of(st.integers(1, 3), st.integers(1, 400), st.just(1000)), "chunk")
                end = min(len(texts[i]), done[i] + size)
                if len(texts[i]) - done[i] > 40 and size < 40:
                    end = len(texts[i]) - size  # small chunks only at the end, or an example takes hundreds of steps
                rows.append(Row(texts[i], tables[i], done[i], end))
                done[i] = end
            logits = executor.logits(make_batch(rows))
            for i, row in zip(live, logits, strict=True):
                if done[i] == len(texts[i]):
                    assert row.tobytes() == judge.expected[chosen[i]], f"text {chosen[i]} differs"

    check()


def test_a_cached_prefix_and_moved_pages_change_nothing(tiny_native: Path, level: str, make_native: Make) -> None:
    one, two = (make_native(tiny_native, num_pages=64, level=level, threads=n) for n in (1, 2))
    ids = text(3)
    expected = one.logits(make_batch([Row(ids, list(range(19)))]))[0].tobytes()
    moved = [40 - p for p in range(16)]
    for here, there in enumerate(moved):
        two.write_page(there, one.read_page(here))
    assert two.logits(make_batch([Row(ids, [*moved, 50, 51, 52], 256)]))[0].tobytes() == expected
    assert two.logits(make_batch([Row(ids, [*moved, 53, 54, 55], 256, 299)]))[0].tobytes() != expected
    assert two.logits(make_batch([Row(ids, [*moved, 53, 54, 55], 299)]))[0].tobytes() == expected


def test_greedy_answers_in_a_batch_are_bit_for_bit_those_alone(tiny_native: Path, make_native: Make) -> None:
    """Rows join one after the other, one of them is retracted and computed again from its prompt and answer."""
    executor = make_native(tiny_native, num_pages=PAGES)
    prompts = [text(i)[: 20 + 9 * i] for i in range(5)]

    def alone(ids: list[int]) -> list[int]:
        out = list(ids)
        for _ in range(30):
            out.append(int(executor.step(*make_step([Row(out, list(range(8)), 0)])).tokens[0]))
        return out

    expected = [alone(p) for p in prompts]
    order, texts, done = list(range(8, PAGES)), [list(p) for p in prompts], [0] * 5
    tables = [[order.pop() for _ in range(8)] for _ in prompts]
    for step in range(60):
        live = [i for i in range(min(5, step + 1)) if len(texts[i]) < len(expected[i])]
        if step == 17:  # retraction: all of its KV is computed again, elsewhere
            executor.poison(tables[1])
            done[1], tables[1] = 0, [order.pop() for _ in range(8)]
        if not live:
            break
        out = executor.step(*make_step([Row(texts[i], tables[i], done[i]) for i in live]))
        for i, token in zip(live, out.tokens, strict=True):
            done[i] = len(texts[i])
            texts[i].append(int(token))
    assert texts == expected


def test_forward_then_sample_is_step_and_the_relay_feeds_the_next(tiny_native: Path, make_native: Make) -> None:
    executor = make_native(tiny_native)
    ids = text(0)
    first = int(executor.step(*make_step([Row(ids, [0, 1, 2, 3])])).tokens[0])
    second = int(executor.step(*make_step([Row([*ids, first], [0, 1, 2, 3], 40)])).tokens[0])
    batch, sampling = make_step([Row(ids, [4, 5, 6, 7])])
    batch.slots[:] = 9
    executor.forward(batch)
    assert int(executor.sample(sampling).tokens[0]) == first
    batch, sampling = make_step([Row([*ids, -1 - 9], [4, 5, 6, 7], 40)])
    batch.slots[:] = 9
    assert int(executor.step(batch, sampling).tokens[0]) == second
    batch, sampling = make_step([Row([*ids, -1 - 33], [8, 9, 10, 11])])
    assert executor.step(batch, sampling).failed.tolist() == [True]  # a slot that never drew
