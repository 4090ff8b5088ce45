"""What a drain does with clients that keep their connections: whoever sends a request, at whatever moment, gets its answer."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from fleet_testing.fake_worker import Script, sse
from fleet_testing.router_fleet import MakeWorker
from fleet_testing.router_process import RouterProcess, until, until_async

pytestmark = [pytest.mark.processes, pytest.mark.rule("R38")]

MakeRouter = Callable[..., Awaitable[RouterProcess]]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
EDGES = pytest.mark.parametrize("edges", ["1", "2"])


def one_connection() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=30, trust_env=False, limits=httpx.Limits(max_connections=1, keepalive_expiry=None))


async def until_refused(router: RouterProcess) -> None:
    """Nobody listens on the data port any more."""

    async def refused() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", router.data_port)
        except (ConnectionRefusedError, ConnectionResetError):
            return True
        writer.close()
        return False

    await until_async(refused, "no new connection is accepted")


async def until_ended(router: RouterProcess) -> None:
    await until(lambda: router.process.poll() is not None, "the router ends")
    assert router.process.returncode == 0, router.log.read_text()


@EDGES
async def test_an_idle_connection_has_its_last_request_answered(edges: str, make_worker: MakeWorker, make_router: MakeRouter) -> None:
    """Red when the drain closes idle connections with its port: a request that is on its way then is lost."""
    router = await make_router("--static", (await make_worker()).url, "--drain-delay", "1", "--workers", edges)
    await router.until_workers(1)
    async with one_connection() as client, one_connection() as fresh:
        assert (await client.get(f"{router.url}/v1/models")).status_code == 200
        router.process.send_signal(signal.SIGTERM)
        await until_refused(router)
        answer = await client.post(f"{router.url}/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        with pytest.raises(httpx.ConnectError):
            await fresh.get(f"{router.url}/v1/models")
    await until_ended(router)


async def test_a_connection_whose_stream_began_before_the_drain_may_bring_one_more_request(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    """Its head promised to keep the connection. Red when the end of the stream closes it."""
    worker = await make_worker()
    router = await make_router("--static", worker.url, "--drain-delay", "1")
    await router.until_workers(1)
    go = asyncio.Event()
    worker.default = Script(wait_after=(1, go), pieces=[sse({"t": 1}, done=False), b"data: [DONE]\n\n"])
    async with one_connection() as client:
        stream = asyncio.create_task(client.post(f"{router.url}/v1/chat/completions", json=CHAT | {"stream": True}))
        await until(lambda: bool(worker.legs), "a stream runs")
        await asyncio.sleep(0.1)
        router.process.send_signal(signal.SIGTERM)
        await until_refused(router)
        go.set()
        assert (await stream).content.endswith(b"data: [DONE]\n\n")
        worker.default = Script()
        answer = await client.post(f"{router.url}/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    await until_ended(router)


async def test_the_port_stays_open_while_requests_still_come(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    """A load balancer that is slow to hear goes on sending; red when the port closes a drain delay after SIGTERM whatever comes."""
    router = await make_router("--static", (await make_worker()).url, "--drain-delay", "3")
    await router.until_workers(1)
    router.process.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + 6
    while time.monotonic() < until_s:
        async with one_connection() as client:
            answer = await client.post(f"{router.url}/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
        await asyncio.sleep(0.05)
    await until_ended(router)


async def test_without_a_drain_delay_idle_connections_end_at_once(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    """Nobody balances load there, and whoever pressed Ctrl-C waits."""
    router = await make_router("--static", (await make_worker()).url)
    await router.until_workers(1)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.data_port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
    await reader.readuntil(b'"ok"}')
    router.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    await until_ended(router)
