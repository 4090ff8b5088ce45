"""Requests, connections and workers are freed by their references alone: they leave nothing of ours to the garbage collector."""

from __future__ import annotations

import asyncio
import collections
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleet_router.decide.index import PrefixIndex
from fleet_testing.fake_worker import Script, sse
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until


@pytest.fixture
async def saving() -> AsyncIterator[list[Any]]:
    """Circles that were left since the last `gc.collect`, not freed but kept."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def ours(garbage: list[Any]) -> collections.Counter[str]:
    return collections.Counter(type(o).__qualname__ for o in garbage if type(o).__module__.startswith("fleet_router"))


@pytest.mark.parametrize("roles", [("unified",), ("prefill", "decode")])
@pytest.mark.parametrize("split", [False, True])
async def test_a_request_leaves_no_circle(
    make_worker: MakeWorker, make_fleet: MakeFleet, saving: list[Any], roles: tuple[str, ...], split: bool
) -> None:
    fleet: Fleet = await make_fleet(*[await make_worker(role=role) for role in roles], split=split)

    async def some() -> None:
        for n in range(5):
            assert (await fleet.chat(f"question {n}")).status_code == 200
            assert (await fleet.stream())[1]
            assert (await fleet.post("/v1/chat/completions", {"model": "nobody", "messages": []})).status_code == 404
        await fleet.idle()

    await some()
    gc.collect()
    saving.clear()
    await some()
    gc.collect()
    assert not ours(saving)


GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n"


async def test_connections_that_end_in_any_way_leave_no_circle(make_worker: MakeWorker, make_fleet: MakeFleet, saving: list[Any]) -> None:
    """Seen red: each had its parser, and that had it; in ten minutes of killed workers and clients that leave they were 15 MiB."""
    worker = await make_worker()
    fleet: Fleet = await make_fleet(worker)
    long = Script(pieces=[sse({"t": 1}, done=False)] * 2, wait_after=(1, asyncio.Event()))

    async def some() -> None:
        for whole in (True, False):
            _, writer = await fleet.connect()
            writer.write(GET + b"\r\n" * whole)
            await asyncio.sleep(0.01)
            writer.close()
        await fleet.raw(GET + b"Connection: close\r\n\r\n")
        await fleet.raw(b"no request\r\n\r\n")
        worker.idle_close = True
        assert [(await fleet.chat(f"{n}")).status_code for n in range(3)] == [200] * 3
        worker.idle_close = False
        worker.legs.clear()
        worker.scripts.append(long)
        leaving = asyncio.create_task(fleet.stream())
        await until(lambda: bool(worker.legs), "the worker streams")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await fleet.idle()
        await until(lambda: len(fleet.edge.server_state.connections) <= 1, "only the test's own kept connection is left")
        await until(lambda: fleet.ready() == 1, "the worker is believed again")

    await some()
    gc.collect()
    saving.clear()
    await some()
    await asyncio.sleep(0.05)
    gc.collect()
    assert not ours(saving)


def test_a_worker_that_is_gone_leaves_no_circle(saving: list[Any]) -> None:
    index = PrefixIndex()
    index.add_slot(0, 64_000, by_history=True)
    index.remember(0, [1, 2, 3])
    index.remove_slot(0)
    while index.sweep():
        pass
    gc.collect()
    assert not ours(saving)
