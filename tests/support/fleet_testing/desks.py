"""A desk's choice, waited for."""

from __future__ import annotations

import asyncio

from fleet_router.desk import Desk, Lease, Promise, Turn, Want


async def acquire(desk: Desk, want: Want, timeout_s: float) -> Lease | None:
    """The lease. Cancelled: it does not wait any more, and what just came is given back."""
    turn = desk.begin(want, timeout_s)
    if not isinstance(turn, Turn):
        return turn
    future: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
    turn.lease.when_done(lambda promise: _tell(promise, future))
    try:
        return await future
    except asyncio.CancelledError:
        desk.leave(turn)
        raise


def _tell(promise: Promise, future: asyncio.Future[Lease | None]) -> None:
    if future.done():  # cancelled, and not left yet
        promise.take_back()
        return
    try:
        future.set_result(promise.result())
    except Exception as e:
        future.set_exception(e)
