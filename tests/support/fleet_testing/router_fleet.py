"""An edge on the test's own event loop, with real sockets: what most of the router's tests look at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx

from fleet_contract.worker import FleetReport
from fleet_router.brain import reports
from fleet_router.single import Single
from fleet_testing.fake_worker import FakeWorker
from fleet_testing.router_process import until
from fleet_testing.split_edge import SplitEdge


class Fleet:
    """An edge in this process, in front of workers."""

    def __init__(self, edge: Single | SplitEdge, port: int, workers: list[FakeWorker]) -> None:
        self.edge = edge
        self.port = port
        self.workers = workers
        self.http = httpx.AsyncClient(timeout=20.0, trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def brain(self) -> Any:
        return self.edge.brain

    def told(self) -> list[dict[str, Any]]:
        """What /workers says."""
        return reports.workers(self.brain)

    def report(self, namespace: str, name: str) -> FleetReport:
        """What the operator is told."""
        return reports.fleet(self.brain, namespace, name)

    def keep_speeds(self) -> None:
        """Every worker stays as fast as its profile says: a moment in which a busy machine held one up does not move its sessions."""
        for load in self.brain.deciding.load.slots.values():
            load.learn = False

    async def until_tokenizers(self, revisions: Iterable[str]) -> None:
        """Waits for the tokenizers of these model revisions: a prompt before it has keys of its bytes, which share none with keys of tokens."""
        wanted = set(revisions)
        await until(lambda: all(self.edge.encoders.get(r) is not None for r in wanted), "the tokenizers are here")

    def inflight(self) -> int:
        return sum(w["inflight"] for w in self.told())

    async def idle(self, limit_s: float = 10.0) -> None:
        """Nothing is in flight, and every table adds up."""
        await until(lambda: self.inflight() == 0, "nothing is in flight", limit_s)
        self.brain.index.check_integrity()

    def ready(self) -> int:
        return sum(w["state"] == "ready" for w in self.told())

    def counter(self, name: str) -> float:
        counters = {self.brain.counters, self.edge.counters}  # the same with a brain beside the edge
        return sum(v for c in counters for n, _, v in c.snapshot({}).counters if n == name)

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        return await self.http.post(
            f"{self.url}/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        )

    async def stream(self) -> tuple[bytes, bool, str]:
        """One streamed chat: its bytes, whether HTTP says that it is complete, its request id."""
        got, request_id = b"", ""
        body = {"model": "tiny", "messages": [], "stream": True}
        try:
            async with self.http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                request_id = response.headers["x-request-id"]
                async for chunk in response.aiter_raw():
                    got += chunk
        except httpx.RemoteProtocolError:
            return got, False, request_id
        return got, True, request_id

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(self.url + path, content=content, headers={"content-type": "application/json", **headers})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, data: bytes, limit_s: float = 10.0) -> bytes:
        """Sends bytes and reads until the router closes."""
        reader, writer = await self.connect()
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), limit_s)
        finally:
            writer.close()

    async def close(self) -> None:
        await self.http.aclose()
        self.edge.server_state.draining = True
        for connection in list(self.edge.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self.edge.stop_accepting()
        await self.edge.close()
        await until(lambda: not self.edge.server_state.connections, "all connections are gone")
        self.edge.server_state.bodies.check_integrity()


MakeFleet = Callable[..., Awaitable[Fleet]]
MakeWorker = Callable[..., Awaitable[FakeWorker]]
