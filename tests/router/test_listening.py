"""Of a burst of new clients many are accepted in one turn of the loop; what closes is refused at once; who reads nothing costs little."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest
import uvloop

from fleet_router.http.listening import PER_TURN, UNSENT_BYTES, listen_on

CLIENTS = 320


class Accepted(asyncio.Protocol):
    """Counts connections."""

    count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Accepted.count += 1
        self.transport = transport


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as s:
        s.setblocking(False)
        yield s


@contextlib.contextmanager
def burst(port: int) -> Iterator[None]:
    """Clients that have connected; nobody accepts them meanwhile."""
    with contextlib.ExitStack() as stack:
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        yield


def test_a_burst_of_clients_is_accepted_in_a_few_turns(listener: socket.socket) -> None:
    uvloop.run(in_few_turns(listener))


async def in_few_turns(listener: socket.socket) -> None:
    Accepted.count = 0
    with burst(listener.getsockname()[1]):
        servers = await listen_on(listener, Accepted)
        turns = 0
        while Accepted.count < CLIENTS and turns < CLIENTS:
            await asyncio.sleep(0)
            turns += 1
        assert turns <= 2 * CLIENTS // PER_TURN, f"{Accepted.count} of {CLIENTS} clients after {turns} turns"
        for server in servers:
            server.close()


def test_each_client_is_accepted_once_and_none_after_the_end(listener: socket.socket) -> None:
    uvloop.run(once_each(listener))


async def once_each(listener: socket.socket) -> None:
    Accepted.count = 0
    address = listener.getsockname()
    servers = await listen_on(listener, Accepted)
    with burst(address[1]):
        async with asyncio.timeout(10):
            while Accepted.count < CLIENTS:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert Accepted.count == CLIENTS
    listener.shutdown(socket.SHUT_RDWR)
    for server in servers:
        server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


def test_the_kernel_keeps_little_of_what_a_client_does_not_read(listener: socket.socket) -> None:
    """Red without TCP_NOTSENT_LOWAT: it takes megabytes for each, which are the pod's, and at the machine's limit nothing of anybody."""
    assert uvloop.run(taken_of_8_mib(listener)) <= 4 * UNSENT_BYTES


async def taken_of_8_mib(listener: socket.socket) -> int:
    """Bytes that left the process for a client that reads nothing."""
    made: asyncio.Future[asyncio.WriteTransport] = asyncio.get_running_loop().create_future()

    class Writes(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.set_result(transport)  # type: ignore[arg-type]

    servers = await listen_on(listener, Writes)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        transport = await made
        transport.write(bytes(size := 8 << 20))
        left = size
        for _ in range(20):  # until two looks see the same
            await asyncio.sleep(0.1)
            before, left = left, transport.get_write_buffer_size()
            if before == left:
                break
        transport.abort()
    for server in servers:
        server.close()
    return size - left
