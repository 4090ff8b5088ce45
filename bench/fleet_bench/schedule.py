"""When requests are sent: pure functions of rate and seed. Seconds from the start of the measurement."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count


def fixed_rate(per_s: float) -> Iterator[float]:
    """0, 1/r, 2/r, … without end. Multiplies instead of adding up, so that errors do not grow."""
    return (n / per_s for n in count())


def poisson(per_s: float, seed: int) -> Iterator[float]:
    """Arrivals of a Poisson process of that rate: exponential gaps; the first request comes after a gap too."""
    rng, at = random.Random(f"arrivals {seed}"), 0.0
    while True:
        at += rng.expovariate(per_s)
        yield at


def replay(timestamps_ms: Sequence[float], speed: float) -> list[float]:
    """A trace's times, the earliest at 0, `speed` times as fast."""
    if not timestamps_ms:
        return []
    first = min(timestamps_ms)
    return [(t - first) / 1000 / speed for t in timestamps_ms]
