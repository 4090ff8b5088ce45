"""A brain that is new and has no edges yet does not make a router unready whose edges serve."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from fleet_router.link import Channel, LinkClient, LinkServer, edge_link_name, listen
from fleet_router.messages import Ask


@pytest.mark.rule("R30")
@pytest.mark.parametrize("edge_is_there", [True, False])
async def test_a_brain_without_its_edges_is_spoken_for_by_them(edge_is_there: bool) -> None:
    name = f"test-{secrets.token_hex(8)}"

    async def brain(ask: Ask) -> bytes:
        return b'{"status":"no_edge"}'

    async def edge(ask: Ask) -> bytes:
        return b'{"status":"degraded"}'

    servers = []
    for at, answer in [(name, brain), (edge_link_name(name, 1), edge)][: 1 + edge_is_there]:
        server = LinkServer(lambda answer=answer: Channel(lambda c, m: None, lambda c: None, answer))  # type: ignore[misc]
        await server.start(listen(at))
        servers.append(server)
    client = LinkClient(name, edges=2)
    task = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(5):
            while client._channel is None:
                await asyncio.sleep(0)
            assert (await client.ask_ready()).body == (b'{"status":"degraded"}' if edge_is_there else b'{"status":"no_edge"}')
    finally:
        task.cancel()
        for server in servers:
            await server.close()
