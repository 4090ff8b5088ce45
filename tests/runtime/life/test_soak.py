"""The small form of `make soak`: mixed requests with aborts and errors, then idle."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_testing import soak


@pytest.mark.processes
def test_nothing_is_left_after_mixed_requests(tmp_path: Path) -> None:
    result = soak.run(tmp_path, 240)
    assert sum(result.ended.values()) == 240 and not result.misses(memory=False), result.table()


def test_a_leak_and_a_surprise_are_misses() -> None:
    bad = soak.Soak(unexpected=["request 1: 500"], warm_bytes={"http": 0}, end_bytes={"http": soak.MAX_GROWTH_BYTES}, left={"pages lost": 1.0})
    assert len(bad.misses(memory=True)) == 4 and len(bad.misses(memory=False)) == 2
    assert not soak.Soak(left={"pages lost": 0.0}, retractions=1).misses(memory=True)
