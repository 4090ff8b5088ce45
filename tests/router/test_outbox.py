"""What is written in one turn of the loop leaves at its end, in order."""

from __future__ import annotations

import asyncio

from fleet_router.http.outbox import Outbox
from fleet_testing.router_fleet import MakeFleet, MakeWorker


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


async def test_one_that_cannot_be_written_to_takes_no_others_bytes_with_it() -> None:
    outbox, sent = Outbox(asyncio.get_running_loop()), []

    def bad() -> None:
        raise OSError("gone")

    outbox.add(bad)
    outbox.add(lambda: sent.append(1))
    await asyncio.sleep(0)
    assert sent == [1]


async def test_who_ends_its_side_in_the_turn_of_its_answers_gets_them_all(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
    writer.write_eof()
    said = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert said.count(b"HTTP/1.1 200") == 2
