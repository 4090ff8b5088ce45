"""Connections as the guard sees them, on a server of the test's own loop."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref
from typing import Any

import pytest
import uvicorn

from fleet_runtime.server.guard import Guard, protocol_class


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("reset", [True, False])
async def test_nothing_of_a_connection_stays_when_it_is_gone(reset: bool) -> None:
    """Also after a reset, which is how a router leaves that has unread bytes: a busy worker would keep thousands of dead connections."""
    guard = Guard(header_timeout_s=30, write_timeout_s=30)
    config = uvicorn.Config(answer, http=protocol_class(guard), ws="none", lifespan="off", log_config=None, timeout_keep_alive=75)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server._serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"ok"), 10)).startswith(b"HTTP/1.1 200")
    (connection,) = (weakref.ref(c) for c in guard.connections)
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    async with asyncio.timeout(10):
        while guard.connections:
            await asyncio.sleep(0.01)
        while gc.collect() >= 0 and connection() is not None:
            await asyncio.sleep(0.05)
    server.should_exit = True
    await serving
