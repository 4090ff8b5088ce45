"""Connections as the guard sees them, on a server of the test's own loop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import struct
import time
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


class Watched(Guard):
    """Notes when it looks at its connections."""

    def check(self, now: float) -> None:
        looks.append(now)


looks: list[float] = []


async def test_a_process_that_stood_still_reads_before_it_judges() -> None:
    """Seen red: uvloop runs timers before it reads, so a connection whose request had come was ended for its headers."""
    watching = asyncio.create_task(Watched(header_timeout_s=30, write_timeout_s=30).run())
    async with asyncio.timeout(10):
        while len(looks) < 2:
            await asyncio.sleep(0.01)
        time.sleep(1)  # noqa: ASYNC251 # the process stands still
        seen = len(looks)
        await asyncio.sleep(0.05)
        assert len(looks) == seen
        while len(looks) == seen:
            await asyncio.sleep(0.01)
    watching.cancel()


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


BODIES = [(FIXED, b"POST /a hello."), (CHUNKED, b"POST /a hello."), (b"Content-Length: 0\r\n\r\n", b"POST /a ."), (b"\r\n", b"POST /a .")]


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.0"])
async def test_a_request_that_asks_for_another_protocol_keeps_its_body(upgrade: bytes) -> None:
    """In one piece, and cut at places of the head and the body. curl --http2 does it with every request to http://. Seen red with the library's
    own `data_received`: 400, "the body is empty"."""
    guard = Guard(header_timeout_s=30, write_timeout_s=30)
    config = uvicorn.Config(echo, http=protocol_class(guard), ws="none", lifespan="off", log_config=None)
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server._serve([listener]))
    for (rest, answer), cut in itertools.product(BODIES, (0, 1, 70, 118, 125)):
        await _ask_for_another(listener.getsockname(), upgrade, rest, answer, cut)
    server.should_exit = True
    await serving


async def _ask_for_another(address: tuple[str, int], upgrade: bytes, rest: bytes, answer: bytes, cut: int) -> None:
    reader, writer = await asyncio.open_connection(*address)
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + upgrade + b"\r\nHTTP2-Settings: AAMAAABk\r\n"
    data = head + rest + b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n"
    for part in (data[:cut], data[cut:]) if cut else (data,):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.01)  # so that it is a piece of its own
    got = await asyncio.wait_for(reader.readuntil(b"GET /b ."), 10)
    assert answer in got and got.count(b"HTTP/1.1 200") == 2, (upgrade, rest, cut)
    writer.close()


class Wire(asyncio.Transport):
    """Where a protocol writes to: `data_received` is called with pieces as large as the test wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.told = bytearray()

    def write(self, data: Any) -> None:
        self.told += data

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...


async def fed(*pieces: bytes) -> bytes:
    """What a connection answers to these pieces."""
    config = uvicorn.Config(echo, http=protocol_class(Guard(header_timeout_s=30, write_timeout_s=30)), ws="none", lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    protocol = config.http_protocol_class(config=config, server_state=server.server_state, app_state={})  # type: ignore[call-arg,operator]
    wire = Wire()
    protocol.connection_made(wire)
    for piece in pieces:
        protocol.data_received(piece)
        for _ in range(20):
            await asyncio.sleep(0)
    while server.server_state.tasks:
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    return bytes(wire.told)


async def test_a_piece_with_a_long_body_and_the_start_of_the_next_request_is_not_a_long_header() -> None:
    body = b"x" * 100_000
    first = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    told = await fed(first + b"GET /b HT", b"TP/1.1\r\nHost: x\r\n\r\n")
    assert told.count(b"HTTP/1.1 200") == 2 and b" 431 " not in told


@pytest.mark.parametrize(("size", "status"), [(45_000, 200), (70_000, 431)])
async def test_headers_are_counted_once_however_they_are_cut(size: int, status: int) -> None:
    whole = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * size + b"\r\n\r\n"
    told = await fed(*[whole[i : i + 9000] for i in range(0, len(whole), 9000)])
    assert told.startswith(b"HTTP/1.1 %d" % status)


async def test_thousands_of_requests_for_another_protocol_in_one_piece_are_answered() -> None:
    told = await fed(b"GET /a HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n" * 2000)
    assert told.count(b"HTTP/1.1 200") == 2000
