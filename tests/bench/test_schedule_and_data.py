"""When requests are due and what they ask: pure functions of the seed."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean

import pytest

from fleet_bench import datasets, schedule
from fleet_bench.datasets import BadDataset, History, Length, Session, Shape, Turn
from fleet_bench.words import WORDS, Calibration, calibrate

SHAPE = Shape(Length(20, 40), Length(5, 9), seed=3)
BUILT_IN = [datasets.random_sessions, datasets.shared_prefix_sessions, datasets.multi_turn_sessions]


def test_a_fixed_rate_does_not_drift() -> None:
    assert list(islice(schedule.fixed_rate(10), 3)) == [0.0, 0.1, 0.2]
    assert next(islice(schedule.fixed_rate(10), 100_000, None)) == 10_000.0


def test_poisson_arrivals_have_the_rate_the_spread_and_the_seed() -> None:
    times = list(islice(schedule.poisson(20, 1), 20_000))
    gaps = [b - a for a, b in pairwise(times)]
    assert times == sorted(times) and times == list(islice(schedule.poisson(20, 1), 20_000)) != list(islice(schedule.poisson(20, 2), 20_000))
    assert fmean(gaps) == pytest.approx(0.05, rel=0.05)
    assert fmean((g - 0.05) ** 2 for g in gaps) ** 0.5 == pytest.approx(0.05, rel=0.05)  # exponential: deviation = mean


@pytest.mark.parametrize("make", BUILT_IN)
def test_the_same_seed_asks_the_same_and_another_seed_does_not(make: object) -> None:
    def take(shape: Shape) -> list[Session]:
        return list(islice(make(shape), 5))  # type: ignore[operator]

    other = Shape(Length(20, 40), Length(5, 9), seed=4)
    assert take(SHAPE) == take(SHAPE) != take(other)


def test_prompts_of_ids_have_exactly_the_length_and_stay_in_the_vocabulary() -> None:
    shape = Shape(Length(17, 17), Length(5, 5), seed=0, prompt_ids=True, vocabulary=(10, 12))
    for session in islice(datasets.random_sessions(shape), 20):
        ids = session.turns[0].content
        assert len(ids) == 17 and set(ids) <= {10, 11, 12}


def test_shared_prefix_prompts_share_one_of_the_prefixes() -> None:
    shape = Shape(Length(4, 4), Length(5, 5), seed=0, prompt_ids=True, prefixes=3, prefix_tokens=50)
    beginnings = {tuple(s.turns[0].content[:50]) for s in islice(datasets.shared_prefix_sessions(shape), 60)}
    assert len(beginnings) == 3


def test_a_conversation_repeats_its_history() -> None:
    history = History(chat=True)
    assert history.prompt(Turn("a", 1)) == [{"role": "user", "content": "a"}]
    history.answered("b")
    assert history.prompt(Turn("c", 1)) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    text = History(chat=False)
    text.prompt(Turn("a", 1))
    text.answered(" b")
    assert text.prompt(Turn("c", 1)) == "a b\nc"


def test_a_limit_counts_turns_and_cuts_the_last_conversation() -> None:
    sessions = list(datasets.limit_requests(datasets.multi_turn_sessions(SHAPE), 6))
    assert [len(s.turns) for s in sessions] == [4, 2]


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def test_a_trace_keeps_its_gaps_its_lengths_and_its_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 4000, "input_length": 32, "output_length": 4, "hash_ids": [1, 9]},
        {"timestamp": 4500, "input_length": 7, "output_length": 5},
    ]
    shape = Shape(Length(1, 1), Length(1, 1), seed=0, prompt_ids=True)
    first, second, third = datasets.trace_sessions(write(tmp_path / "t.jsonl", *rows), shape, speed=2.0, block=16)
    assert [s.at_s for s in (first, second, third)] == [0.0, 0.25, 0.5]
    a, b, c = (s.turns[0].content for s in (first, second, third))
    assert [len(x) for x in (a, b, c)] == [32, 7, 20]
    assert a[:16] == c[:16] and a[16:20] != c[16:20]
    assert [s.turns[0].max_tokens for s in (first, second, third)] == [4, 5, 3]


def test_a_trace_as_text_shares_prefixes_too(tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 24, "output_length": 1, "hash_ids": [1, t]} for t in (2, 3)]
    a, b = (s.turns[0].content for s in datasets.trace_sessions(write(tmp_path / "t.jsonl", *rows), SHAPE, 1.0, block=16))
    assert isinstance(a, str) and isinstance(b, str)
    assert a.split()[:16] == b.split()[:16] and a != b and len(a.split()) == 24


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "a JSON object is needed"),
        ({"timestamp": 0, "input_length": -1}, "input_length, output_length must be a number"),
        ({"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [3]}, "do not cover"),
    ],
)
def test_a_bad_trace_names_the_line(line: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line)
    with pytest.raises(BadDataset, match=message):
        datasets.trace_sessions(path, SHAPE, 1.0)


def test_a_file_of_prompts_is_asked_over_and_over(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "one", "max_tokens": 2}, {"messages": [{"role": "user", "content": "two"}]})
    turns = [s.turns[0] for s in islice(datasets.file_sessions(path, Length(7, 7), 0), 3)]
    assert [(t.content, t.max_tokens) for t in turns] == [("one", 2), ([{"role": "user", "content": "two"}], 7), ("one", 2)]


@pytest.mark.parametrize("line", [{"text": "x"}, {"prompt": ""}, {"prompt": "x", "max_tokens": 0}])
def test_a_bad_file_of_prompts_is_refused(line: object, tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match="line 1"):
        next(datasets.file_sessions(write(tmp_path / "p.jsonl", line), Length(7, 7), 0))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match="holds no request"):
        datasets.trace_sessions(write(tmp_path / "t.jsonl"), SHAPE, 1.0)


async def test_calibration_finds_the_tokens_of_a_word_and_of_the_template() -> None:
    async def server(prompt: str) -> int:
        return 30 + round(1.5 * len(prompt.split()))

    found = await calibrate(server, 0)
    assert found == Calibration(1.5, 30.0)
    assert found.words(330) == 200


async def test_a_server_without_usage_leaves_prompts_uncalibrated() -> None:
    async def server(prompt: str) -> None:
        return None

    assert await calibrate(server, 0) is None


def test_the_word_list_has_no_word_twice() -> None:
    assert len(set(WORDS)) == len(WORDS)
