"""Probes as a table over the heartbeat board."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet_runtime import heartbeat as hb
from fleet_runtime import messages as m
from fleet_runtime.server.health import Process, Snapshot, not_live, not_ready


def board(**rows: Process) -> Snapshot:
    fine = Process(hb.PHASE_READY)
    return {who: rows.get(who, fine) for who in (m.SUPERVISOR, *m.CHILDREN)}


STARTING, DEAD, DRAINING = Process(hb.PHASE_STARTING), Process(hb.PHASE_DEAD, text="scheduler was killed by SIGSEGV"), Process(hb.PHASE_DRAINING)


@pytest.mark.parametrize(
    ("name", "rows", "live", "ready"),
    [
        ("all is well", {}, None, None),
        ("loading", {"scheduler": Process(hb.PHASE_STARTING, 40, "reading weights"), "supervisor": STARTING}, None, "loading 40 %: reading weights"),
        ("before anything", {"scheduler": Process(hb.PHASE_ABSENT), "supervisor": Process(hb.PHASE_ABSENT)}, None, "loading 0 %"),
        ("http not warm", {"http": STARTING}, None, "loading: http is starting"),
        ("dead", {"scheduler": DEAD}, "scheduler was killed by SIGSEGV", "scheduler was killed by SIGSEGV"),
        ("draining", {"supervisor": DRAINING}, None, "the worker is shutting down; it takes no new requests"),
        ("busy", {"scheduler": Process(hb.PHASE_READY, silent_s=29, pending=1)}, None, None),
        ("stalled", {"scheduler": Process(hb.PHASE_READY, silent_s=31, pending=1)}, "no progress for 31 s", "no progress for 31 s"),
        (
            "frozen before it took the request",
            {"scheduler": Process(hb.PHASE_READY, silent_s=31), "http": Process(hb.PHASE_READY, inflight=1)},
            "31 s",
            "31 s",
        ),
        ("idle and silent", {"scheduler": Process(hb.PHASE_READY, silent_s=1000)}, None, None),
        (
            "slow load is no stall",
            {"scheduler": Process(hb.PHASE_STARTING, 50, silent_s=500), "http": Process(hb.PHASE_READY, inflight=1)},
            None,
            "loading 50 %",
        ),
        ("frozen detokenizer", {"detokenizer": Process(hb.PHASE_READY, silent_s=31)}, "the detokenizer has not gone round for 31 s", "31 s"),
    ],
)
def test_probes(name: str, rows: dict[str, Process], live: str | None, ready: str | None) -> None:
    for error, words in ((not_live(board(**rows), 30), live), (not_ready(board(**rows), 30), ready)):
        assert (error is None) == (words is None)
        if error is not None and words is not None:
            assert words in error.message and error.status == 503


WRITER = """
import sys
from fleet_runtime.heartbeat import Board
board = Board.open(sys.argv[1])
row = board.row("detokenizer")
print("begins", flush=True)
while True:
    row.beat()
    row.set(phase=2, steps=0x0123456789ABCDEF)
    board.set_counters({"steps_total": 0x0123456789ABCDEF})
"""
READS = 100_000


def test_no_reader_sees_a_number_that_is_half_written(tmp_path: Path) -> None:
    board = hb.Board.create(tmp_path)
    row = board.row(m.DETOKENIZER)
    row.beat()
    row.set(phase=hb.PHASE_READY, steps=0x0123456789ABCDEF)
    board.set_counters({"steps_total": 0x0123456789ABCDEF})
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == b"begins\n"
            seen = {(row.phase, row.steps) for _ in range(READS)}
            counted = {board.counters()["steps_total"] for _ in range(READS // 20)}
            silent = [row.silent_s() for _ in range(READS)]
        finally:
            writer.kill()
    assert seen == {(hb.PHASE_READY, 0x0123456789ABCDEF)}
    assert counted == {0x0123456789ABCDEF}
    assert min(silent) >= 0 and max(silent) <= time.monotonic() - began
