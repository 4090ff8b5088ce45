"""`make soak`: thousands of mixed requests with aborts, errors and retractions against one worker, then idle: nothing may be left.

Prints one table and exits non-zero on a miss. The small form runs in `make test` (tests/runtime/life/test_soak.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from fleet_testing.runtime import Runtime

MAX_GROWTH_BYTES = 20 << 20
IDLE_S = 5.0
# A pool that 32 rows of the longest requests fill several times over: rows are moved out and back.
FLAGS = (
    "--context-length=640", f"--kv-cache-memory={72 << 10}", "--max-rows=32", "--max-step-tokens=128", "--simulated-step-base-ms=3",
    "--simulated-step-per-row-ms=0.01", "--simulated-prefill-tokens-per-s=1000000", "--new-token-ratio=0.1",
)  # fmt: skip
_SHARED = "A prefix that many requests share. " * 6


@dataclass(slots=True)
class Soak:
    """What was sent, how it ended, and what is held afterwards."""

    ended: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    warm_bytes: dict[str, int] = field(default_factory=dict)
    end_bytes: dict[str, int] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    retractions: float = 0.0

    def misses(self, *, memory: bool) -> list[str]:
        """Sentences, one a fault. memory: also judge the growth of each process (needs a warm-up of thousands of requests)."""
        out = list(self.unexpected[:10])
        if memory and not self.retractions:
            out.append("no request was retracted: the pool is not small enough for this to show anything")
        out += [f"{name} is {value:g} after idle" for name, value in self.left.items() if value]
        for who in self.warm_bytes if memory else ():
            grown = self.end_bytes[who] - self.warm_bytes[who]
            if grown >= MAX_GROWTH_BYTES:
                out.append(f"{who} grew by {grown / 2**20:.1f} MiB; less than {MAX_GROWTH_BYTES >> 20} is allowed")
        return out

    def table(self) -> str:
        """For the terminal."""
        lines = [f"  {kind:24} {count:6d}" for kind, count in sorted(self.ended.items())]
        lines.append(f"  {'retractions':24} {self.retractions:6.0f}")
        for who, warm in self.warm_bytes.items():
            lines.append(f"  resident {who:15} {warm / 2**20:6.1f} MiB warm, {self.end_bytes[who] / 2**20:6.1f} MiB at the end")
        lines += [f"  left: {name:34} {value:g}" for name, value in self.left.items()]
        return "\n".join(lines)


def run(folder: Path, requests: int, *, seed: int = 0, concurrency: int = 48) -> Soak:
    """The whole of it, over a worker of its own."""
    soak = Soak()
    with Runtime(folder, *FLAGS) as runtime:
        runtime.wait_ready()
        warm = max(1, requests // 4)
        asyncio.run(_send(runtime, soak, warm, seed, concurrency))
        soak.warm_bytes = resident_bytes(runtime)
        asyncio.run(_send(runtime, soak, requests - warm, seed + 1, concurrency))
        _settle(runtime, soak)
        soak.end_bytes = resident_bytes(runtime)
        if runtime.ended():
            soak.unexpected.append("the worker has ended")
    return soak


def resident_bytes(runtime: Runtime) -> dict[str, int]:
    """Private and shared resident memory of each process of the worker."""
    out = {"supervisor": psutil.Process(runtime.process.pid).memory_info().rss}
    for who in ("http", "scheduler", "detokenizer"):
        out[who] = runtime.child(who).memory_info().rss
    return out


def _settle(runtime: Runtime, soak: Soak) -> None:
    """Waits until nothing runs, flushes the cache, and notes what is held all the same."""
    names = ("radixfleet_runtime_http_open_requests", "radixfleet_runtime_running_requests", "radixfleet_runtime_waiting_requests")
    deadline = time.monotonic() + 30
    while any(runtime.metrics()[n] for n in names) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(IDLE_S)
    flushed = httpx.post(f"{runtime.internal}/flush_cache", json={}, timeout=10)
    if flushed.status_code != 200:
        soak.unexpected.append(f"flush_cache: {flushed.status_code} {flushed.text[:200]}")
    metrics = runtime.metrics()
    short = {name.removeprefix("radixfleet_runtime_"): value for name, value in metrics.items()}
    soak.left = {n: short[n] for n in ("http_open_requests", "running_requests", "waiting_requests", "pages_request", "pages_tree")}
    soak.left["pages lost"] = short["pages_total"] - short["pages_free"]
    soak.left["self_check_failures_total"] = short.get("self_check_failures_total", 0.0)
    soak.retractions = short.get("retractions_total", 0.0)


async def _send(runtime: Runtime, soak: Soak, count: int, seed: int, concurrency: int) -> None:
    rng = random.Random(seed)
    kinds: list[tuple[str, Callable[..., Awaitable[str]]]] = [
        ("plain", _plain), ("stream", _stream), ("hang up", _hang_up), ("aborted", _aborted), ("refused", _refused), ("choices", _choices),
    ]  # fmt: skip
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def one(number: int, kind: str, act: Callable[..., Awaitable[str]], local: random.Random) -> None:
            async with gate:
                try:
                    verdict = await act(client, runtime, local)
                except httpx.HTTPError as e:
                    verdict = f"unexpected: {type(e).__name__} {e}"
            if verdict.startswith("unexpected"):
                soak.unexpected.append(f"request {number} ({kind}): {verdict}")
            soak.ended[f"{kind}: {verdict.split(':')[0]}"] += 1

        chosen = [(n, *rng.choice(kinds), random.Random(rng.random())) for n in range(count)]
        await asyncio.gather(*(one(*c) for c in chosen))


def _body(rng: random.Random, **fields: Any) -> dict[str, Any]:
    text = (_SHARED if rng.random() < 0.5 else "") + "x" * rng.randrange(1, 120)
    most = rng.choice((1, 4, 16, 64, 160))
    return {"model": "simulated", "prompt": text, "max_tokens": most, "temperature": rng.choice((0, 1)), **fields}


async def _plain(client: httpx.AsyncClient, runtime: Runtime, rng: random.Random) -> str:
    body = _body(rng)
    answer = await client.post(f"{runtime.data}/v1/completions", json=body)
    if answer.status_code == 429:
        return "queue full"
    ok = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
    return "ok" if ok else f"unexpected: {answer.status_code} {answer.text[:200]}"


async def _stream(client: httpx.AsyncClient, runtime: Runtime, rng: random.Random) -> str:
    async with client.stream("POST", f"{runtime.data}/v1/completions", json=_body(rng, stream=True)) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    if answer.status_code == 429:
        return "queue full"
    return "ok" if answer.status_code == 200 and lines[-1] == "data: [DONE]" else f"unexpected: {answer.status_code} {lines[-1:]}"


async def _hang_up(client: httpx.AsyncClient, runtime: Runtime, rng: random.Random) -> str:
    async with client.stream("POST", f"{runtime.data}/v1/completions", json=_body(rng, stream=True, max_tokens=200)) as answer:
        seen, most = 0, rng.randrange(4)
        async for _ in answer.aiter_lines():
            seen += 1
            if seen > most:
                break
    return "left"


async def _aborted(client: httpx.AsyncClient, runtime: Runtime, rng: random.Random) -> str:
    rid = rng.randbytes(16).hex()
    headers = {"x-radixfleet-rid": rid}
    asked = asyncio.ensure_future(client.post(f"{runtime.internal}/v1/completions", json=_body(rng, max_tokens=200), headers=headers))
    await asyncio.sleep(rng.random() * 0.05)
    for _ in range(rng.randrange(1, 3)):
        await client.post(f"{runtime.internal}/abort_request", json={"rid": rid})
    answer = await asked
    return "ok" if answer.status_code in (200, 429, 499) else f"unexpected: {answer.status_code} {answer.text[:200]}"


async def _refused(client: httpx.AsyncClient, runtime: Runtime, rng: random.Random) -> str:
    wrong = rng.choice(({"max_tokens": 10_000}, {"temperature": -1}, {"prompt": ""}, {"model": "none"}, {"prompt": [10**6]}, {"top_p": 0}))
    answer = await client.post(f"{runtime.data}/v1/completions", json=_body(rng, **wrong))
    return "ok" if 400 <= answer.status_code < 500 else f"unexpected: {answer.status_code} {answer.text[:200]}"


async def _choices(client: httpx.AsyncClient, runtime: Runtime, rng: random.Random) -> str:
    answer = await client.post(f"{runtime.data}/v1/completions", json=_body(rng, n=rng.randrange(2, 5), max_tokens=24, stop=["zq"]))
    if answer.status_code == 429:
        return "queue full"
    return "ok" if answer.status_code == 200 else f"unexpected: {answer.status_code} {answer.text[:200]}"


def main(argv: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rf-soak-") as folder, contextlib.ExitStack():
        soak = run(Path(folder), options.requests, seed=options.seed)
    print(soak.table())
    misses = soak.misses(memory=True)
    for miss in misses:
        print(f"MISS: {miss}")
    print("soak:", "FAILED" if misses else "passed")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
