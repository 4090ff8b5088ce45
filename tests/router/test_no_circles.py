"""A request is freed by its references alone: it leaves nothing of ours to the garbage collector."""

from __future__ import annotations

import collections
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker


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
