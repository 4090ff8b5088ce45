"""`/livez` and `/readyz` as pure functions of the heartbeat board. They answer in microseconds, whatever the scheduler does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fleet_contract.errors import OVERLOADED, SERVER, ApiError
from fleet_runtime import heartbeat as hb
from fleet_runtime import messages as m


@dataclass(frozen=True, slots=True)
class Process:
    """One row of the board, as read."""

    phase: int
    percent: int = 0
    text: str = ""
    silent_s: float = 0.0
    pending: int = 0
    inflight: int = 0


Snapshot = dict[str, Process]
_ALL: Final = (m.SUPERVISOR, *m.CHILDREN)


def look(board: hb.Board) -> Snapshot:
    """Reads the board."""
    rows = {who: board.row(who) for who in _ALL}
    return {who: Process(r.phase, r.percent, r.text, r.silent_s(), r.pending, r.inflight) for who, r in rows.items()}


def not_live(board: Snapshot, stall_timeout_s: float) -> ApiError | None:
    """Why the worker should be restarted; None while it lives. A child that starts (again) is alive."""
    for who in m.CHILDREN:
        if board[who].phase == hb.PHASE_DEAD:
            return _refusal("dead", board[who].text or f"{who} died", SERVER)
    return _stalled(board, stall_timeout_s)


def not_ready(board: Snapshot, stall_timeout_s: float) -> ApiError | None:
    """Why the worker takes no requests now; None when it does."""
    if board[m.SUPERVISOR].phase == hb.PHASE_DRAINING or board[m.HTTP].phase == hb.PHASE_DRAINING:
        return _refusal("draining", "the worker is shutting down; it takes no new requests", OVERLOADED)
    if (dead := not_live(board, stall_timeout_s)) is not None:
        return dead
    scheduler = board[m.SCHEDULER]
    if scheduler.phase < hb.PHASE_READY:
        what = f": {scheduler.text}" if scheduler.text else ""
        return _refusal("loading", f"loading {scheduler.percent} %{what}", OVERLOADED)
    for who in (m.DETOKENIZER, m.HTTP, m.SUPERVISOR):
        if board[who].phase < hb.PHASE_READY:
            return _refusal("loading", f"loading: {who} is starting", OVERLOADED)
    return None


def _stalled(board: Snapshot, stall_timeout_s: float) -> ApiError | None:
    """The scheduler must go round while there is work; the detokenizer always does."""
    scheduler, detokenizer, http = board[m.SCHEDULER], board[m.DETOKENIZER], board[m.HTTP]
    has_work = scheduler.pending > 0 or http.inflight > 0
    if scheduler.phase in (hb.PHASE_READY, hb.PHASE_DRAINING) and has_work and scheduler.silent_s > stall_timeout_s:
        return _refusal("stalled", f"the scheduler has work but has made no progress for {scheduler.silent_s:.0f} s", SERVER)
    if detokenizer.phase == hb.PHASE_READY and detokenizer.silent_s > stall_timeout_s:
        return _refusal("stalled", f"the detokenizer has not gone round for {detokenizer.silent_s:.0f} s", SERVER)
    return None


def _refusal(code: str, message: str, type: str) -> ApiError:
    return ApiError(503, message, type=type, code=code, retry_after_s=1)
