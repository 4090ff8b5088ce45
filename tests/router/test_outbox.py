"""What is written in one turn of the loop leaves at its end, in order."""

from __future__ import annotations

import asyncio

from fleet_router.http.outbox import Outbox


async def test_what_is_sent_in_one_turn_leaves_at_its_end_in_order() -> None:
    outbox, sent = Outbox(asyncio.get_running_loop()), []
    for n in range(3):
        outbox.add(lambda n=n: sent.append(n))  # type: ignore[misc]
    assert not sent
    await asyncio.sleep(0)
    assert sent == [0, 1, 2]
    outbox.add(lambda: outbox.add(lambda: sent.append(9)))
    await asyncio.sleep(0)
    assert sent == [0, 1, 2]
    await asyncio.sleep(0)
    assert sent == [0, 1, 2, 9]
