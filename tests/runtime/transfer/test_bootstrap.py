"""The bootstrap server over real sockets, and the addresses it is asked at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from fleet_contract.handoff import Route
from fleet_runtime.transfer.bootstrap import BootstrapServer, NotRegistered, RouteError, fetch_route, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("h:1", "h", 1), ("10.0.0.7:8998", "10.0.0.7", 8998), ("[fd00::7]:8998", "fd00::7", 8998), ("fd00::7:8998", "fd00::7", 8998)],
)
def test_addresses_of_both_families_are_read(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@pytest.mark.parametrize("address", ["", "h", "h:", ":1", "h:x", "h:0", "h:70000", "[]:5"])
def test_a_bad_address_is_named(address: str) -> None:
    with pytest.raises(RouteError, match="host:port"):
        split_address(address)


@pytest.fixture
async def server() -> AsyncIterator[BootstrapServer]:
    server = BootstrapServer()
    await server.start("127.0.0.1", 0)
    yield server
    server.close()


async def test_the_route_is_503_until_the_worker_is_registered(server: BootstrapServer) -> None:
    with pytest.raises(NotRegistered):
        await fetch_route("127.0.0.1", server.port, timeout_s=5)
    server.route = Route(incarnation="a" * 16, pod_uid="p", transfer_port=5, backends=["tcp"])
    assert await fetch_route("127.0.0.1", server.port, timeout_s=5) == server.route


async def test_ipv6_is_served() -> None:
    server = BootstrapServer()
    try:
        await server.start("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server.route = Route(incarnation="b" * 16)
    assert await fetch_route("::1", server.port, timeout_s=5) == server.route
    server.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /nothing HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /route HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
    ],
)
async def test_other_requests_get_a_status(server: BootstrapServer, request_bytes: bytes, status: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.split()[1] == status
    writer.close()


async def test_an_endless_head_is_cut_off(server: BootstrapServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"x" * 100_000)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_port_that_never_answers_is_an_error_in_time() -> None:
    silent = await asyncio.start_server(lambda r, w: asyncio.sleep(30), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(RouteError, match=r"within 0.2 s"):
        await fetch_route("127.0.0.1", port, timeout_s=0.2)
    silent.close()
