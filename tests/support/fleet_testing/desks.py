"""A desk's choice, waited for."""

from __future__ import annotations

import asyncio

from fleet_contract.errors import ApiError
from fleet_router.desk import ComingLease, Desk, Lease, Turn, Want


async def acquire(desk: Desk, want: Want, timeout_s: float) -> Lease | None:
    """The lease. Cancelled: it does not wait any more, and what just came is given back."""
    turn = desk.begin(want, timeout_s)
    if not isinstance(turn, Turn):
        return turn
    future: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
    turn.coming.when_done(lambda coming: _tell(coming, future))
    try:
        return await future
    except asyncio.CancelledError:
        desk.leave(turn)
        if future.done() and not future.cancelled() and future.exception() is None and (lease := future.result()) is not None:
            lease.release()  # it came, and nobody took it
        raise


def _tell(coming: ComingLease, future: asyncio.Future[Lease | None]) -> None:
    try:
        lease = coming.result()
    except ApiError as e:
        if not future.done():
            future.set_exception(e)
        return
    if not future.done():
        future.set_result(lease)
    elif lease is not None:  # cancelled in this very moment
        lease.release()
