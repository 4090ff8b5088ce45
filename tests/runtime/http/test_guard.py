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


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    body = f"{scope['method']} {scope['path']} ".encode() + body + b"."
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


FIXED = b"Content-Length: 5\r\n\r\nhello"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.0"])
@pytest.mark.parametrize(
    ("rest", "answer"),
    [(FIXED, b"POST /a hello."), (CHUNKED, b"POST /a hello."), (b"Content-Length: 0\r\n\r\n", b"POST /a ."), (b"\r\n", b"POST /a .")],
)
@pytest.mark.parametrize("cut", [0, 1, 70, 118, 125])
async def test_a_request_that_asks_for_another_protocol_keeps_its_body(upgrade: bytes, rest: bytes, answer: bytes, cut: int) -> None:
    """curl --http2 does it with every request to http://. Seen red with the library's own `data_received`: 400, "the body is empty"."""
    guard = Guard(header_timeout_s=30, write_timeout_s=30)
    config = uvicorn.Config(echo, http=protocol_class(guard), ws="none", lifespan="off", log_config=None)
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server._serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + upgrade + b"\r\nHTTP2-Settings: AAMAAABk\r\n"
    data = head + rest + b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n"
    for part in (data[:cut], data[cut:]) if cut else (data,):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.01)
    got = await asyncio.wait_for(reader.readuntil(b"GET /b ."), 10)
    assert answer in got and got.count(b"HTTP/1.1 200") == 2
    writer.close()
    server.should_exit = True
    await serving
