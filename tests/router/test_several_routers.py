"""Several routers in front of the same workers, behind a balancer that knows nothing: what is lost against one router (C50, R32, R33)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_testing.engines.caching import CachingVllm
from fleet_testing.engines.server import Timing
from fleet_testing.router_process import RouterProcess, until_async

Start = Callable[..., Awaitable[Any]]
MakeRouter = Callable[..., Awaitable[RouterProcess]]
CONVERSATIONS, TURNS, AT_ONCE = 40, 5, 8
SYSTEM = list(range(1, 65))  # tokens that all conversations begin with


FIRST, MORE = 1_024, 64  # tokens of a conversation's first turn, and what each adds: a miss costs more than any queue of hits
OWN = 10_000  # ids of each conversation


def prompt(conversation: int, turn: int) -> list[int]:
    """What a conversation asks in its n-th turn."""
    return [*SYSTEM, *(OWN * (conversation + 1) + n for n in range(FIRST + MORE * turn))]


class World:
    """Three workers, and the routers that a balancer draws from."""

    def __init__(self, workers: list[CachingVllm], routers: list[RouterProcess], folder: Path) -> None:
        self.workers = workers
        self.routers = routers
        self.static = ",".join(f"{w.target}&tokenizer={folder}" for w in workers)
        self._draw = random.Random(50)

    async def turn(self, number: int) -> None:
        """One turn of every conversation, some at a time."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def ask(conversation: int) -> None:
            async with gate:
                router = self._draw.choice(self.routers)
                body = {"model": "org/tiny", "prompt": prompt(conversation, number), "max_tokens": 1}
                answer = await router.http.post(f"{router.url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

        await asyncio.gather(*(ask(c) for c in self._draw.sample(range(CONVERSATIONS), CONVERSATIONS)))

    async def ready(self, router: RouterProcess) -> None:
        """It knows all workers, believes their streams and can read prompts."""

        async def knows() -> bool:
            workers = (await router.get("/workers"))["workers"]
            return [w["events"]["trust"] for w in workers] == ["live"] * len(self.workers)

        await until_async(knows, "the router knows what there is")
        await router.until_reads_prompts("org/tiny")

    def hit_share(self) -> float:
        """Tokens that were cached, of all that were asked."""
        served = [p for w in self.workers for p in w.served_prompts]
        return sum(cached for _, cached in served) / sum(len(ids) for ids, _ in served)

    def misses(self) -> list[int]:
        """By conversation: later turns for which a worker had no more than what all share."""
        out = [0] * CONVERSATIONS
        for worker in self.workers:
            for ids, cached in worker.served_prompts:
                if len(ids) > len(prompt(0, 0)) and cached <= len(SYSTEM):
                    out[ids[len(SYSTEM)] // OWN - 1] += 1
        return out


@pytest.fixture
async def world(start_engine: Start, make_router: MakeRouter, tokenizer_folder: Path) -> Callable[[int], Awaitable[World]]:
    async def make(count: int) -> World:
        workers = [await start_engine(CachingVllm(timing=Timing(prefill_s=0.0001))) for _ in range(3)]
        made = World(workers, [], tokenizer_folder)
        made.routers = [await make_router("--static", made.static) for _ in range(count)]
        for router in made.routers:
            await made.ready(router)
        return made

    return make


@pytest.mark.case("C50")
@pytest.mark.rule("R32")
@pytest.mark.rule("R33")
async def test_two_routers_find_what_one_finds_and_a_restart_costs_no_conversation_more_than_a_miss(
    world: Callable[[int], Awaitable[World]], make_router: MakeRouter
) -> None:
    """Red without the subscription to every worker's events: each router knows its own half of the turns."""
    alone, both = await world(1), await world(2)
    for turn in range(TURNS):
        await alone.turn(turn)
        if turn == 2:
            await both.routers.pop().stop()
            both.routers.append(await make_router("--static", both.static))
            await both.ready(both.routers[-1])
        await both.turn(turn)
    assert alone.hit_share() > 0.5, "the conversations share too little for this to show anything"
    assert both.hit_share() >= alone.hit_share() - 0.05
    assert max(both.misses()) <= 1 and sum(both.misses()) <= CONVERSATIONS // 2
    for one in (alone, both):
        computed = [sum(len(ids) - cached for ids, cached in w.served_prompts) for w in one.workers]
        assert max(computed) <= 2 * sum(computed) / len(computed), computed
    for router in both.routers:
        await router.until_idle()
