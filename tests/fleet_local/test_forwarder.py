"""The forwarder: bytes both ways, half-closed connections, names looked up by DNS, and an HTTP answer when nobody is there."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_local import forwarder


@asynccontextmanager
async def forwarding(target: str) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(forwarder.serve(listener, target))
    try:
        yield listener.getsockname()[1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def answering(text: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that reads to the end and only then answers; what it read."""
    got: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.read())
        writer.write(text)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], got


async def test_a_sender_that_has_finished_still_gets_its_answer() -> None:
    large = bytes(range(256)) * 8192
    async with answering(large) as (port, got), forwarding(f"127.0.0.1:{port}") as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front)
        writer.write(large)
        writer.write_eof()
        async with asyncio.timeout(60):
            assert await reader.read() == large
        writer.close()
    assert got == [large]


async def test_many_connections_at_once_do_not_mix() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        async with forwarding(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as front:

            async def one(i: int) -> None:
                reader, writer = await asyncio.open_connection("127.0.0.1", front)
                writer.write(f"{i}\n".encode())
                assert await reader.read() == f"{i}\n".encode()
                writer.close()

            async with asyncio.timeout(60):
                await asyncio.gather(*(one(i) for i in range(200)))


async def test_a_client_that_hangs_up_is_felt_by_the_server() -> None:
    felt = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.005)
        except OSError:
            felt.set()
        finally:
            writer.close()

    async with await asyncio.start_server(stream, "127.0.0.1", 0) as server:
        async with forwarding(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as front:
            reader, writer = await asyncio.open_connection("127.0.0.1", front)
            await reader.readexactly(1000)
            writer.close()
            async with asyncio.timeout(60):
                await felt.wait()


async def test_a_named_service_that_is_not_there_is_answered_with_503_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(host: str) -> str:
        raise OSError(f"there is no service {host}")

    monkeypatch.setattr(forwarder, "resolve", nobody)
    async with forwarding("router.system.svc:80") as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front)
        async with asyncio.timeout(60):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 503 ")
    error = json.loads(body)["error"]
    assert error["code"] == "router_unreachable" and "there is no service router.system.svc" in error["message"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}


async def test_an_address_that_does_not_answer_is_closed_without_a_word() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    async with forwarding(f"127.0.0.1:{port}") as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


def answer(query: bytes, address: str | None, *, compress: bool = True) -> bytes:
    question = query[12:]
    record = (b"\xc0\x0c" if compress else question[:-4]) + struct.pack(">HHIH", 1, 1, 2, 4) + socket.inet_aton(address or "0.0.0.0")
    return query[:2] + struct.pack(">HHHHH", 0x8180, 1, 1 if address else 0, 0, 0) + question + (record if address else b"")


@pytest.mark.parametrize("compress", [True, False])
def test_an_address_is_read_out_of_a_dns_answer(compress: bool) -> None:
    query = forwarder.dns_query("radixfleet-router.radixfleet-system.svc.cluster.local", 7)
    assert forwarder.dns_answer(answer(query, "10.96.3.4", compress=compress), 7) == "10.96.3.4"
    assert forwarder.dns_answer(answer(query, None), 7) is None
    assert forwarder.dns_answer(answer(query, "10.96.3.4"), 8) is None


@given(st.binary(max_size=80), st.integers(0, 2**16 - 1))
def test_garbage_is_no_answer_and_no_crash(packet: bytes, query_id: int) -> None:
    head = query_id.to_bytes(2) + b"\x81\x80"
    for data in (packet, head + packet):
        found = forwarder.dns_answer(data, query_id)
        assert found is None or socket.inet_aton(found)
