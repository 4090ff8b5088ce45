"""What is measured of one router: a round of each scenario, figures by key. Called by `__main__`; blocks."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fleet_bench.peers.servers import MODEL, Server, ServerFailed
from fleet_bench.router.load import CHATS, TURNS, run_wrk, script
from fleet_bench.router.routers import cpu_s
from fleet_bench.router.tools import Tools

Figures = dict[str, float]
CONNECTIONS: Final = 32
CHUNKS: Final = 250
CHUNK_PAUSE_S: Final = 0.004
MEMORY_REQUESTS: Final = 200_000
IDLE_STREAMS: Final = 2_000
IDLE_WORKERS: Final = 100
SETTLE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Round:
    """One router and its workers as a scenario sees them. `number` differs in each round and is the same for all routers of it."""

    server: Server
    worker_url: str
    tools: Tools
    number: int
    seconds: float

    @property
    def start(self) -> int:
        """First number of this round's chats."""
        return self.number * 1_000_000


def chats(r: Round, key: str = "chats") -> Figures:
    """Requests a second and their times, 32 connections, whole answers."""
    before = cpu_s(r.server)
    load = run_wrk(r.tools, r.server.url, script(CHATS, start=r.start), connections=CONNECTIONS, seconds=r.seconds)
    cpu_us = 1e6 * (cpu_s(r.server) - before) / load.requests
    return {f"{key}-rate": load.per_second, f"{key}-p50": load.p50_us, f"{key}-p99": load.p99_us, f"{key}-cpu": cpu_us}


def chats_bytes(r: Round) -> Figures:
    """The same where our router has no tokenizer."""
    return chats(r, "chats-bytes")


def chunks(r: Round) -> Figures:
    """Processor time per chunk of 32 streams with a chunk each 4 ms; requests and their ends are in it."""
    before = cpu_s(r.server)
    seconds = max(r.seconds, 3 * CHUNKS * CHUNK_PAUSE_S)  # so that streams end on a busy machine too
    load = run_wrk(r.tools, r.server.url, script(CHATS, start=r.start, stream=True), connections=CONNECTIONS, seconds=seconds)
    used = cpu_s(r.server) - before
    unfinished = CONNECTIONS / 2  # when wrk stops; half done in the mean
    return {"chunks": 1e6 * used / ((load.requests + unfinished) * CHUNKS)}


def turns(r: Round, key: str = "turns") -> Figures:
    """What the router adds to the median time of a request, one connection; against the same requests sent to a worker itself."""
    text = script(TURNS, start=r.start)
    direct = run_wrk(r.tools, r.worker_url, text, connections=1, seconds=max(1.0, r.seconds / 3))
    load = run_wrk(r.tools, r.server.url, text, connections=1, seconds=r.seconds)
    return {key: load.p50_us - direct.p50_us}


def turns_bytes(r: Round) -> Figures:
    """The same where our router has no tokenizer."""
    return turns(r, "turns-bytes")


def memory(r: Round, requests: int = MEMORY_REQUESTS) -> Figures:
    """Resident memory after many requests, all with prompts of their own, and what half as many more add: by then all that is bounded is full."""
    done = _send(r, 0, requests)
    time.sleep(SETTLE_S)
    before = r.server.memory_bytes() / (1 << 20)
    _send(r, done, requests // 2)
    time.sleep(SETTLE_S)
    return {"memory": before, "memory-slope": r.server.memory_bytes() / (1 << 20) - before}


def _send(r: Round, done: int, requests: int) -> int:
    """So many chats or a few more. Args: done: those of before. Returns: all of them."""
    first = done
    while done - first < requests:
        done += run_wrk(r.tools, r.server.url, script(CHATS, start=r.start + done), connections=CONNECTIONS, seconds=2).requests
    return done


def idle_streams(r: Round, count: int = IDLE_STREAMS) -> Figures:
    """Resident memory of a stream that is open and silent."""
    time.sleep(SETTLE_S)
    before = r.server.memory_bytes()
    after = asyncio.run(_hold_streams(r.server, count))
    return {"idle-streams": (after - before) / count / 1024}


async def _hold_streams(server: Server, count: int) -> int:
    """Opens streams, waits for the first event of each, and gives the router's memory with all of them open."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}, separators=(",", ":")).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    writers: list[asyncio.StreamWriter] = []

    async def open_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=8192)
        writers.append(writer)
        writer.write(head + body)
        await reader.readuntil(b"data: ")

    try:
        for first in range(0, count, 50):
            async with asyncio.timeout(60):
                await asyncio.gather(*(open_one() for _ in range(min(50, count - first))))
        await asyncio.sleep(SETTLE_S)
        return server.memory_bytes()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as e:
        raise ServerFailed(f"{server.kind.name}: stream {len(writers)} of {count} did not begin: {e!r}") from e
    finally:
        for writer in writers:
            writer.transport.abort()


def idle_workers(r: Round) -> Figures:
    """Processor time with a hundred workers and no request, in percent of one core."""
    time.sleep(SETTLE_S)
    before, began = cpu_s(r.server), time.monotonic()
    time.sleep(max(5.0, r.seconds * 4))
    return {"idle-workers": 100 * (cpu_s(r.server) - before) / (time.monotonic() - began)}


def choice() -> Figures:
    """What a decision costs, by the router's own command. Raises ServerFailed."""
    done = subprocess.run([sys.executable, "-m", "fleet_router.decide.bench"], capture_output=True, text=True, timeout=300)
    found = {int(workers): float(us) for us, workers in _CHOICE.findall(done.stdout)}
    if not {32, 1000} <= found.keys():
        raise ServerFailed(f"fleet_router.decide.bench told no decision: {(done.stderr or done.stdout)[-300:]}")
    return {"choice-32": found[32], "choice-1000": found[1000]}


_CHOICE: Final = re.compile(r"([\d.]+) us  decide, (\d+) workers x 192 blocks")


@dataclass(frozen=True, slots=True)
class Entry:
    """A scenario: what runs, beside whom, over which mock workers."""

    run: Callable[[Round], Figures]
    workers: str = "whole"  # whole, plain (no tokenizer), paced, silent, many
    peers: bool = True
    once: bool = False  # long or steady: one round, two of those with peers


SCENARIOS: Final = {
    "chats": Entry(chats),
    "chats-bytes": Entry(chats_bytes, "plain"),
    "chunks": Entry(chunks, "paced"),
    "turns": Entry(turns),
    "turns-bytes": Entry(turns_bytes, "plain"),
    "memory": Entry(memory, once=True),
    "idle-streams": Entry(idle_streams, "silent", peers=False, once=True),
    "idle-workers": Entry(idle_workers, "many", peers=False, once=True),
}
