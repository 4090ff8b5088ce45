"""`radixfleet bench step --kernels`: which kernels take the time of a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from fleet_runtime.engine.native.bench import Timing, kernel_table
from fleet_runtime.engine.native.library import KINDS


def test_the_table_has_the_longest_kernel_first_and_its_times_are_the_step() -> None:
    cycles = np.zeros((2, len(KINDS), 2), np.uint64)
    cycles[:, KINDS.index("qkv")] = [[100, 20], [110, 10]]
    cycles[:, KINDS.index("head")] = [[400, 0], [300, 60]]
    lines = kernel_table(Timing(0.001, 0.002, cycles)).splitlines()[1:]
    assert [line.split() for line in lines] == [["head", "0.700", "0.060", "76.0%"], ["qkv", "0.210", "0.030", "24.0%"]]


def test_the_command_tells_the_kernels_of_a_step(tiny_native: Path) -> None:
    options = ["--model", str(tiny_native), "--rows", "2", "--context", "32", "--prefill", "48", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "fleet_bench", "step", "--kernels", *options], capture_output=True, text=True, check=True, timeout=120
    )
    decode, prefill = done.stdout.split("prefill  tokens")
    assert "rows   2" in decode and "write kv" not in decode and "write kv" in prefill
    for text in (decode, prefill):
        shares = [float(line.rpartition(" ")[2].rstrip("%")) for line in text.splitlines() if line.endswith("%")]
        assert shares == sorted(shares, reverse=True) and abs(sum(shares) - 100) < 1
