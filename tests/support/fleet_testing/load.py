"""A steady open-loop load of streamed chats on an endpoint, and what became of each: for end-to-end scenarios."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split()


@dataclass
class Load:
    """What became of the requests of one load."""

    sent: int = 0
    ok: int = 0
    failed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)


async def one(client: httpx.AsyncClient, url: str, model: str, n: int, load: Load, tokens: int) -> None:
    """One streamed chat of about 32 tokens in; complete only with a finish reason and [DONE]."""
    text = f"{n} " + " ".join(WORDS[(n + i) % len(WORDS)] for i in range(4))
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": True}
    started = time.monotonic()
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            data = (await answer.aread()).decode()
        if answer.status_code != 200:
            load.failed.append(f"{answer.status_code} {data[:300]}")
        elif not data.rstrip().endswith("data: [DONE]") or '"finish_reason":"' not in data.replace(" ", ""):
            load.failed.append(f"truncated: {data[-300:]}")
        else:
            load.ok += 1
    except httpx.HTTPError as e:
        load.failed.append(f"{type(e).__name__}: {e}")
    load.slowest_s = max(load.slowest_s, time.monotonic() - started)


@asynccontextmanager
async def steady(url: str, model: str, *, per_s: float, tokens: int = 8) -> AsyncIterator[Load]:
    """Sends requests at a fixed rate, open loop, until the block ends; then waits for those under way."""
    load = Load()
    limits = httpx.Limits(max_connections=2000, max_keepalive_connections=200)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        stop = asyncio.Event()

        async def run() -> None:
            start = time.monotonic()
            while not stop.is_set():
                task = asyncio.create_task(one(client, url, model, load.sent, load, tokens))
                load._tasks.add(task)
                task.add_done_callback(load._tasks.discard)
                load.sent += 1
                await asyncio.sleep(max(0.0, start + load.sent / per_s - time.monotonic()))

        sender = asyncio.create_task(run())
        try:
            yield load
        finally:
            stop.set()
            await sender
            await asyncio.gather(*load._tasks)
