"""Statistics of recorded timestamps; no clock runs here."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fleet_bench.record import Record
from fleet_bench.stats import Slo, percentile, summarise


def record(origin: float, tokens: list[float], end: float | None = None, **fields: object) -> Record:
    r = Record(0, 0, 0, origin, sent_s=origin, token_s=tokens, end_s=end if end is not None else tokens[-1], status=200)
    for name, value in fields.items():
        setattr(r, name, value)
    return r


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [([7.0], 99, 7.0), ([1.0, 2.0], 50, 1.5), ([3.0, 1.0, 2.0], 50, 2.0), ([float(n) for n in range(101)], 95, 95.0), ([0.0, 10.0], 90, 9.0)],
)
def test_percentiles(values: list[float], p: float, expected: float) -> None:
    assert percentile(values, p) == pytest.approx(expected)


def test_percentiles_are_those_of_numpy() -> None:
    rng = random.Random(1)
    for size in (1, 2, 3, 10, 997):
        values = [rng.expovariate(1) for _ in range(size)]
        for p in (0, 50, 90, 95, 99, 100):
            assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)))


def test_latencies_count_from_the_time_a_request_was_due() -> None:
    r = record(10.0, [10.5, 10.6, 10.8], 10.9)
    r.sent_s = 10.4  # late: the request waited in the client
    s = summarise([r])
    assert s.ttft_ms is not None and s.ttft_ms.mean == pytest.approx(500)
    assert s.e2e_ms is not None and s.e2e_ms.mean == pytest.approx(900)
    assert s.send_delay_ms is not None and s.send_delay_ms.mean == pytest.approx(400)
    assert s.itl_ms is not None and (s.itl_ms.count, s.itl_ms.mean) == (2, pytest.approx(150))


def test_time_per_token_uses_the_usage_when_an_event_holds_several_tokens() -> None:
    r = record(0.0, [1.0, 1.3], completion_tokens=4)
    assert r.tpot_s == pytest.approx(0.1)
    assert record(0.0, [1.0, 1.3]).tpot_s == pytest.approx(0.3)
    assert record(0.0, [1.0]).tpot_s is None


def test_rates_are_over_the_time_from_the_first_origin_to_the_last_end() -> None:
    s = summarise(
        [record(100.0, [101.0], 102.0, completion_tokens=10, prompt_tokens=30), record(101.0, [103.0], 104.0, completion_tokens=6, prompt_tokens=2)]
    )
    assert (s.duration_s, s.requests_per_s, s.output_tokens_per_s, s.total_tokens_per_s) == (4.0, 0.5, 4.0, 12.0)
    assert (s.token_counts, s.cached_tokens) == ("usage", None)


def test_goodput_counts_requests_that_keep_every_limit_and_failures_never() -> None:
    good = record(0.0, [0.1, 0.2], 0.2)
    late = record(0.0, [0.4, 0.5], 0.5)
    slow = record(0.0, [0.1, 0.9], 1.0)
    failed = record(0.0, [0.1, 0.2], 0.2, error="truncated")
    s = summarise([good, late, slow, failed], Slo(ttft_s=0.3, itl_s=0.2))
    assert (s.good, s.goodput_per_s, s.failed) == (1, pytest.approx(1.0), 1)
    assert summarise([good]).goodput_per_s is None


def test_failures_are_counted_by_kind_and_give_no_latency() -> None:
    failed = [Record(0, 0, 0, 0.0, error=kind) for kind in ("connect", "http 503", "connect")]
    s = summarise(failed)
    assert s.errors == {"connect": 2, "http 503": 1}
    assert (s.completed, s.ttft_ms, s.requests_per_s) == (0, None, 0.0)


def test_counts_say_when_only_some_answers_had_a_usage() -> None:
    assert summarise([record(0.0, [1.0], completion_tokens=1), record(0.0, [1.0])]).token_counts == "mixed"
    assert summarise([record(0.0, [1.0, 2.0])]).output_tokens == 2
