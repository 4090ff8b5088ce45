"""Probes as a table over the heartbeat board."""

from __future__ import annotations

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
