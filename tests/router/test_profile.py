"""`make router-profile` tells every stage, compiled as the router runs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.model
def test_the_profile_tells_where_the_microseconds_go() -> None:
    done = subprocess.run([sys.executable, "-m", "fleet_router.profile", "--requests", "20"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for title in ("with token ids", "without a tokenizer"):
        lines = done.stdout.partition(title)[2].split("\n")[1:]
        told = {name: float(us) for us, _, name in (line.strip().partition(" us  ") for line in lines[:15] if " us  " in line)}
        for stage in ("JSON", "choice, counted and given back", "a whole request", "a chunk of a stream"):
            assert told[stage] > 0, (title, told)
