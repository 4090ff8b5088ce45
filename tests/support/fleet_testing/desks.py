"""A desk's choice, waited for."""

from __future__ import annotations

import asyncio

from fleet_router.desk import Desk, Lease, Turn, Want


async def acquire(desk: Desk, want: Want, timeout_s: float) -> Lease | None:
    """The lease. Cancelled: it does not wait any more, and what just came is given back."""
    turn = desk.begin(want, timeout_s)
    if not isinstance(turn, Turn):
        return turn
    try:
        return await turn.lease
    except asyncio.CancelledError:
        desk.leave(turn)
        raise
