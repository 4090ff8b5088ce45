"""Numbers of a run out of its records: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fleet_bench.record import Record

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile, linear between the two nearest ranks (numpy's default). `values` is not empty; any order."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request keeps, in seconds; None: no limit. `itl_s` is a limit of the mean, i.e. of TPOT."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_set(self) -> bool:
        return (self.ttft_s, self.itl_s, self.e2e_s) != (None, None, None)

    def holds(self, r: Record) -> bool:
        """Whether a request ended well within the limits. A limit on a time that the request does not have (one token) holds."""
        pairs = ((r.ttft_s, self.ttft_s), (r.tpot_s, self.itl_s), (r.e2e_s, self.e2e_s))
        return r.ok and all(limit is None or value is None or value <= limit for value, limit in pairs)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    count: int


def spread(values_s: Sequence[float]) -> Spread | None:
    """None when there is no value."""
    if not values_s:
        return None
    p50, p90, p95, p99 = (1000 * percentile(values_s, p) for p in PERCENTILES)
    return Spread(1000 * math.fsum(values_s) / len(values_s), p50, p90, p95, p99, len(values_s))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Latencies are of requests that ended well; rates are over `duration_s`, first origin to last end."""

    requests: int
    completed: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the server does not say
    output_tokens_per_s: float
    total_tokens_per_s: float
    token_counts: str  # usage | events | mixed
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    send_delay_ms: Spread | None  # how late we sent: a large one means that the client, not the server, was the limit
    good: int | None  # requests within the SLO; None: no SLO was given
    goodput_per_s: float | None


def summarise(records: Sequence[Record], slo: Slo = Slo()) -> Summary:
    """All numbers of a run."""
    good = [r for r in records if r.ok]
    ends = [r.end_s for r in records if r.end_s is not None]
    duration = max(ends) - min(r.origin_s for r in records) if ends else 0.0

    def per_s(n: float) -> float:
        return n / duration if duration > 0 else 0.0

    prompt = sum(r.prompt_tokens or 0 for r in good)
    output = sum(r.output_tokens for r in good)
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    counted = {r.completion_tokens is not None for r in good}
    within = sum(slo.holds(r) for r in records) if slo.is_set else None
    return Summary(
        requests=len(records),
        completed=len(good),
        failed=len(records) - len(good),
        errors=dict(sorted(Counter(r.error or "unfinished" for r in records if not r.ok).items())),
        duration_s=duration,
        requests_per_s=per_s(len(good)),
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(cached) if cached else None,
        output_tokens_per_s=per_s(output),
        total_tokens_per_s=per_s(prompt + output),
        token_counts="mixed" if len(counted) == 2 else "usage" if True in counted else "events",
        ttft_ms=spread([v for r in good if (v := r.ttft_s) is not None]),
        itl_ms=spread([gap for r in good for gap in r.itl_s]),
        tpot_ms=spread([v for r in good if (v := r.tpot_s) is not None]),
        e2e_ms=spread([v for r in good if (v := r.e2e_s) is not None]),
        send_delay_ms=spread([r.sent_s - r.origin_s for r in records if r.sent_s is not None]),
        good=within,
        goodput_per_s=None if within is None else per_s(within),
    )
