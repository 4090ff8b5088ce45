"""One round of each scenario on one server: pure load over HTTP, gives figures by key. Called by `rounds`."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from fleet_bench.client import CannotConnect, Client, ConnectionLost, Endpoint, fetch
from fleet_bench.datasets import Session, Turn
from fleet_bench.exchange import Target
from fleet_bench.load import Run, closed_loop
from fleet_bench.peers.servers import MODEL, Server
from fleet_bench.record import Record
from fleet_bench.stats import percentile
from fleet_bench.step import ask
from fleet_bench.words import text

OUTPUT: Final = 128
VOCABULARY: Final = (100, 40_000)  # token ids of prompts; SmolLM2 has 49,152
Figures = dict[str, float]


class RoundFailed(Exception):
    """A round gave no figures; the message says which request failed and how."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One server as a scenario sees it. `seed` differs in each round, and is the same for all servers of a round."""

    server: Server
    seed: int

    def prompts(self, count: int, tokens: int, what: str) -> list[str | list[int]]:
        """The same for each server that takes ids; the others get about as many words."""
        rng = random.Random(f"{what} {self.seed}")
        if self.server.kind.takes_ids:
            return [[rng.randint(*VOCABULARY) for _ in range(tokens)] for _ in range(count)]
        return [text(rng, tokens) for _ in range(count)]

    def target(self) -> Target:
        takes = self.server.kind.takes_ids
        # llama.cpp's Python server knows no ignore_eos; a bias on <|endoftext|> and <|im_end|> does the same.
        extra = {} if takes else {"logit_bias": {"0": -100, "2": -100}}
        return Target(MODEL, "completions", ignore_eos=takes, usage=takes, extra=extra, timeout_s=300)

    def client(self) -> Client:
        return Client(Endpoint.from_url(self.server.url), headers={}, clock=time.monotonic)

    async def ask_all(self, client: Client, prompts: Sequence[str | list[int]], max_tokens: int) -> list[Record]:
        """All prompts at once. Raises RoundFailed when one fails or an answer is short."""
        run = Run(client, self.target(), time.monotonic)
        await closed_loop(run, iter([Session([Turn(p, max_tokens)]) for p in prompts]), concurrency=len(prompts))
        for r in run.records:
            if not r.ok:
                raise RoundFailed(f"{self.server.kind.name}: {r.error}: {r.message}")
            if r.completion_tokens is not None and r.completion_tokens != max_tokens:
                raise RoundFailed(f"{self.server.kind.name} gave {r.completion_tokens} tokens, {max_tokens} were asked for")
        return run.records


def span_s(records: Sequence[Record]) -> float:
    """First request sent to last answer whole."""
    return max(r.end_s or 0.0 for r in records) - min(r.origin_s for r in records)


def tokens_of(records: Sequence[Record], max_tokens: int) -> int:
    """Output tokens; a server without usage has been kept from ending early, so that it gave them all."""
    return sum(max_tokens if r.completion_tokens is None else r.completion_tokens for r in records)


async def decode(b: Bench, *, rows: int, key: str) -> Figures:
    """Output tokens a second of `rows` short prompts at once, whole requests."""
    client = b.client()
    try:
        await b.ask_all(client, b.prompts(rows, 16, f"warm {key}"), 4)  # caches of the processor and kernels of this batch
        records = await b.ask_all(client, b.prompts(rows, 16, key), OUTPUT)
        return {key: tokens_of(records, OUTPUT) / span_s(records)}
    finally:
        client.close()


async def context(b: Bench) -> Figures:
    """Decoding behind 1,024 tokens of context at batch 8. The prompts are computed before, so that both sides have them in their prefix cache."""
    client = b.client()
    try:
        prompts = b.prompts(8, 1024, "context")
        await b.ask_all(client, prompts, 1)
        records = await b.ask_all(client, prompts, OUTPUT)
        return {"context-8": tokens_of(records, OUTPUT) / span_s(records)}
    finally:
        client.close()


async def prefill(b: Bench) -> Figures:
    """Prompt tokens a second of 8 new prompts of 1,024 tokens, one token of answer each."""
    client = b.client()
    try:
        await b.ask_all(client, b.prompts(1, 256, "warm prefill"), 1)
        records = await b.ask_all(client, b.prompts(8, 1024, "prefill"), 1)
        return {"prefill": 8 * 1024 / span_s(records)}
    finally:
        client.close()


async def flood(b: Bench) -> Figures:
    """Eight rows decode while four clients send new prompts of 2,000 tokens without a pause: gaps between the rows' tokens during the flood."""
    client, other = b.client(), b.client()
    try:
        rows = Run(client, b.target(), time.monotonic)
        prompts = b.prompts(8, 16, "rows")
        sessions = iter([Session([Turn(p, 4 * OUTPUT)]) for p in prompts])
        playing = asyncio.create_task(closed_loop(rows, sessions, concurrency=8))
        while not playing.done() and sum(len(r.token_s) > 4 for r in rows.records) < 8:
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        rng = random.Random(f"flood {b.seed}")
        endless = (Session([Turn([rng.randint(*VOCABULARY) for _ in range(2000)], 1)]) for _ in iter(int, 1))
        prompts_run = Run(other, b.target(), time.monotonic)
        flooding = asyncio.create_task(closed_loop(prompts_run, endless, concurrency=4))
        await asyncio.wait({playing, flooding}, timeout=FLOOD_S, return_when=asyncio.FIRST_COMPLETED)
        end = time.monotonic()
        for task in (flooding, playing):
            task.cancel()
        await asyncio.gather(flooding, playing, return_exceptions=True)
        return _flood_figures(b, rows.records, prompts_run.records, begin, end)
    finally:
        client.close()
        other.close()


FLOOD_S: Final = 8.0


def _flood_figures(b: Bench, rows: Sequence[Record], flood: Sequence[Record], begin: float, end: float) -> Figures:
    for r in [*rows, *flood]:
        if r.error is not None:
            raise RoundFailed(f"{b.server.kind.name}: {r.error}: {r.message}")
    if not any(r.ok for r in flood):
        raise RoundFailed(f"{b.server.kind.name} finished none of the flood's prompts within {end - begin:.1f} s")
    gaps = gaps_within(rows, begin, end)
    if not gaps:
        raise RoundFailed(f"{b.server.kind.name}: no row went on during the flood")
    return {
        "flood-itl-mean": 1000 * fmean(gaps),
        "flood-itl-p99": 1000 * percentile(gaps, 99),
        "flood-prefill": sum(2000 for r in flood if r.ok) / (end - begin),
    }


def gaps_within(rows: Sequence[Record], begin: float, end: float) -> list[float]:
    """Gaps between tokens that ended in the flood.

    A row that still waits at the end counts with its wait when that is its longest: a stall without end would not count else.
    """
    out: list[float] = []
    for r in rows:
        times = [t for t in r.token_s if t <= end]
        gaps = [b - a for a, b in pairwise(times) if b > begin]
        if times and (r.end_s is None or r.end_s > end) and (waits := end - times[-1]) > max(gaps, default=0.0):
            gaps.append(waits)
        out += gaps
    return out


async def busy_front_end(b: Bench) -> Figures:
    """How much decoding at batch 8 loses, in per cent, while another process asks /tokenize without a pause."""
    client = b.client()
    try:
        await b.ask_all(client, b.prompts(8, 16, "warm front end"), 4)
        quiet = await b.ask_all(client, b.prompts(8, 16, "quiet"), OUTPUT)
        argv = [sys.executable, "-m", "fleet_bench.peers.tokenize_flood", b.server.url, MODEL]
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            if await process.stdout.readline() != b"flowing\n":
                raise RoundFailed("the flood of /tokenize did not start")
            busy = await b.ask_all(client, b.prompts(8, 16, "busy"), OUTPUT)
        finally:
            process.terminate()
            told, _ = await process.communicate()
        rates = [tokens_of(r, OUTPUT) / span_s(r) for r in (quiet, busy)]
        return {"front-end": 100 * (1 - rates[1] / rates[0]), "front-end-tokenize": float(told.decode().split()[-1])}
    finally:
        client.close()


async def scheduler(b: Bench) -> Figures:
    """Time of a step outside the executor at 32 rows, by the worker's own profile; our server only."""
    client = b.client()
    internal = Client(Endpoint("127.0.0.1", b.server.second_port), headers={}, clock=time.monotonic)
    try:
        playing = asyncio.create_task(b.ask_all(client, b.prompts(32, 16, "scheduler"), 2 * OUTPUT))
        await asyncio.sleep(1.0)  # all rows decode then; were it too early, the profile would hold prefill steps too, and be larger
        try:
            profile = await ask(internal, 64, 60)
        finally:
            await playing
        if profile.steps < 32:
            raise RoundFailed(f"the profile saw {profile.steps} steps; 32 rows were at work for {2 * OUTPUT}")
        return {"scheduler": profile.scheduler_us}
    finally:
        client.close()
        internal.close()


async def first_answer(b: Bench, *, limit_s: float = 300.0) -> Figures:
    """From the start of the process to the end of its first answer."""
    client = b.client()
    try:
        while True:
            b.server.check()
            try:
                if (await fetch(client, "GET", "/health", timeout_s=5)).status in (200, 404) or not b.server.kind.takes_ids:
                    await b.ask_all(client, b.prompts(1, 16, "first"), 1)
                    return {"start": time.monotonic() - b.server.started_s}
            except (CannotConnect, ConnectionLost, TimeoutError, RoundFailed):
                pass
            if time.monotonic() - b.server.started_s > limit_s:
                raise RoundFailed(f"{b.server.kind.name} gave no answer within {limit_s:g} s; its log: {b.server.log}")
            await asyncio.sleep(0.05)
    finally:
        client.close()


Scenario = Callable[[Bench], Awaitable[Figures]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A scenario by name: on which servers it runs."""

    run: Scenario
    servers: tuple[str, ...]


ALL: Final = ("ours", "vllm", "vllm-eager")
SCENARIOS: Final[dict[str, Entry]] = {
    "decode-1": Entry(lambda b: decode(b, rows=1, key="decode-1"), (*ALL, "llama")),
    "decode-8": Entry(lambda b: decode(b, rows=8, key="decode-8"), ALL),
    "decode-32": Entry(lambda b: decode(b, rows=32, key="decode-32"), ALL),
    "context-8": Entry(context, ALL),
    "prefill": Entry(prefill, ALL),
    "flood": Entry(flood, ("ours", "vllm")),
    "front-end": Entry(busy_front_end, ("ours", "vllm")),
    "scheduler": Entry(scheduler, ("ours",)),
}
