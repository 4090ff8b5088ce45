"""Fixtures of the router's tests: scripted workers, an edge on the test's own loop (real sockets), a router of real processes."""

from __future__ import annotations

import io
import secrets
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_router.link import listen
from fleet_router.settings import Settings, parse
from fleet_router.single import Single
from fleet_router.supervisor import bind
from fleet_testing.engines.server import FakeEngine
from fleet_testing.fake_worker import FakeWorker, tiny_tokenizer_zip
from fleet_testing.router_fleet import Fleet, MakeFleet
from fleet_testing.router_process import RouterProcess, until
from fleet_testing.split_edge import SplitEdge


@pytest.fixture
async def make_worker() -> AsyncIterator[Callable[..., Awaitable[FakeWorker]]]:
    """Starts scripted workers, and ends them."""
    started: list[FakeWorker] = []

    async def make(role: str = "unified", **options: Any) -> FakeWorker:
        worker = await FakeWorker.start(role=role, **options)
        started.append(worker)
        return worker

    yield make
    for worker in started:
        await worker.stop()


@pytest.fixture
async def make_fleet() -> AsyncIterator[MakeFleet]:
    """Starts an edge on this loop in front of workers; waits until all of them are ready and their tokenizer is here.

    `split`: with the link between edge and brain. `peer_socket`: the port for other routers.
    """
    started: list[Fleet] = []

    async def make(
        *workers: FakeWorker, wait: bool = True, split: bool = False, max_files: int = 4096, peer_socket: Any = None, **settings: Any
    ) -> Fleet:
        options = {"router_id": "r", "host": "127.0.0.1", "poll_interval": 0.05, "static": tuple(w.url for w in workers)} | settings
        edge = (SplitEdge if split else Single)(Settings(**options), max_files=max_files)
        data = bind("127.0.0.1", 0, "--data-port")
        await edge.start(data, listen(f"test-{secrets.token_hex(8)}"), peer_socket)
        fleet = Fleet(edge, data.getsockname()[1], list(workers))
        started.append(fleet)
        if wait:
            await until(lambda: fleet.ready() == len(workers), "all workers are ready")
            served = fleet.edge.desk.table.services.values
            await until(lambda: fleet.edge.desk.synced or not any(s.ready_units() for s in served()), "the router knows all that it can")
            await fleet.until_tokenizers(w.record.model_revision for w in workers)
        return fleet

    yield make
    for fleet in started:
        await fleet.close()


@pytest.fixture
async def make_router(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[RouterProcess]]]:
    """Starts routers of real processes, and ends them."""
    started: list[RouterProcess] = []

    async def make(*flags: str, **options: Any) -> RouterProcess:
        folder = tmp_path / f"router{len(started)}"
        folder.mkdir()
        router = await RouterProcess.start(folder, "--poll-interval", "0.1", *flags, **options)
        started.append(router)
        return router

    yield make
    for router in started:
        await router.stop()


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """The tiny tokenizer, as a model folder on the router's machine."""
    folder = tmp_path / "tokenizer"
    with zipfile.ZipFile(io.BytesIO(tiny_tokenizer_zip())) as z:
        z.extractall(folder)
    return folder


@pytest.fixture
def settings_of() -> Callable[..., Settings]:
    return lambda *flags: parse(flags)


@pytest.fixture
async def start_engine() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Starts a scripted engine of another kind that was made, and ends it."""
    started: list[FakeEngine] = []

    async def start(engine: FakeEngine) -> FakeEngine:
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
def front(make_fleet: MakeFleet) -> Callable[..., Awaitable[Fleet]]:
    """An edge in front of workers named by URL; waits until so many are ready (all of them by default), and the tokenizers that these name."""

    async def make(*urls: str, ready: int | None = None, **settings: Any) -> Fleet:
        fleet = await make_fleet(wait=False, static=urls, **settings)
        wanted = len(urls) if ready is None else ready
        await until(lambda: fleet.ready() == wanted, "the workers are ready")
        there = [w for s in fleet.edge.desk.table.services.values() for w in s.workers if w.routable and w.record.tokenizer]
        await fleet.until_tokenizers(w.record.model_revision for w in there)
        return fleet

    return make
