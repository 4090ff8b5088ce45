"""A lease that comes is heard once, by nobody who has left, and is given back when nobody has heard it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from fleet_contract.errors import ApiError
from fleet_router.desk import ComingLease, Lease, Leg


class Counted(Lease):
    """A lease that only counts how often it was released."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), 1, "", cast(Leg, None), None, 0, 0)
        self.released = 0

    def release(self) -> None:
        self.released += 1


async def test_it_is_heard_at_once_or_with_a_loop_in_its_next_turn() -> None:
    heard: list[Any] = []
    now, later, failed = ComingLease(), ComingLease(asyncio.get_running_loop()), ComingLease()
    for coming in (now, later, failed):
        coming.when_done(heard.append)
    now.give(None)
    later.give(None)
    assert heard == [now] and now.result() is None
    await asyncio.sleep(0)
    assert heard == [now, later]
    failed.fail(ApiError(503, "busy"))
    assert heard == [now, later, failed]
    with pytest.raises(ApiError, match="busy"):
        failed.result()


@pytest.mark.parametrize("left", ["before", "between", "after"])
@pytest.mark.parametrize("has_loop", [True, False])
async def test_whoever_leaves_hears_nothing_and_what_was_not_heard_is_given_back(left: str, *, has_loop: bool) -> None:
    coming, lease, heard = ComingLease(asyncio.get_running_loop() if has_loop else None), Counted(), []
    coming.when_done(heard.append)
    if left == "before":
        coming.leave()
    coming.give(lease)
    if left == "between":
        coming.leave()
    await asyncio.sleep(0)
    if left == "after":
        coming.leave()
    was_heard = left == "after" or (left == "between" and not has_loop)
    assert heard == ([coming] if was_heard else [])
    assert lease.released == (0 if was_heard else 1), "whoever heard it releases it"
