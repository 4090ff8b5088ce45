"""A steady open-loop load of chats on an endpoint, and what became of each: for end-to-end scenarios."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split()
PROMPTS = 48  # different ones of a mixed load


@dataclass
class Load:
    """What became of the requests of one load."""

    sent: int = 0
    ok: int = 0
    failed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    stage: str = ""  # named in front of each failure
    _answers: dict[str, str] = field(default_factory=dict)  # of a mixed load: what each question was answered first
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def fail(self, why: str, n: int) -> None:
        self.failed.append(f"{self.stage}: request {n}: {why}" if self.stage else why)


@dataclass(frozen=True, slots=True)
class Question:
    """One chat. `is_fixed`: everybody who asks it gets the same answer, of exactly `tokens` tokens."""

    model: str
    text: str
    tokens: int
    stream: bool = True
    is_fixed: bool = False

    def body(self) -> dict[str, Any]:
        body = {"model": self.model, "messages": [{"role": "user", "content": self.text}], "max_tokens": self.tokens, "stream": self.stream}
        return body | {"temperature": 0, "ignore_eos": True} if self.is_fixed else body

    @property
    def key(self) -> str:
        return f"{self.text} ({self.tokens})"


def streamed(model: str, n: int, tokens: int) -> Question:
    """The n-th of a plain load: a streamed chat of about 32 tokens in."""
    return Question(model, f"{n} " + " ".join(WORDS[(n + i) % len(WORDS)] for i in range(4)), tokens)


def mixed(models: Sequence[str], n: int) -> Question:
    """The n-th of a mixed load: models in turn, half of it streamed, every tenth of each long."""
    turn = n // len(models)
    text = f"question {turn % PROMPTS} " + " ".join(WORDS[(turn % PROMPTS + i) % len(WORDS)] for i in range(6))
    return Question(models[n % len(models)], text, 100 if turn % 20 < 2 else 8, stream=turn % 2 == 0, is_fixed=True)


def problem(question: Question, status: int, data: str) -> tuple[str, str]:
    """What is wrong with an answer, or an empty text; and the text that was answered. Complete is only what has a finish reason, and [DONE]
    when it is a stream."""
    if status != 200:
        return f"{status} {data[:300]}", ""
    if not question.stream:
        try:
            choice = json.loads(data)["choices"][0]
        except (ValueError, LookupError):
            return f"no answer: {data[-300:]}", ""
        return ("" if choice["finish_reason"] else f"no finish reason: {data[-300:]}"), choice["message"]["content"]
    if not data.rstrip().endswith("data: [DONE]"):
        return f"truncated: {data[-300:]}", ""
    events = [json.loads(line.removeprefix("data: ")) for line in data.splitlines() if line.startswith("data: {")]
    if errors := [e["error"] for e in events if "error" in e]:
        return f"error event: {errors[0]}", ""
    choices = [c for e in events for c in e["choices"]]
    text = "".join(c["delta"].get("content") or "" for c in choices)
    return ("" if any(c.get("finish_reason") for c in choices) else f"no finish reason: {data[-300:]}"), text


async def one(client: httpx.AsyncClient, url: str, question: Question, n: int, load: Load) -> None:
    """Asks, and notes what became of it."""
    started = time.monotonic()
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=question.body()) as answer:
            data = (await answer.aread()).decode()
        wrong, text = problem(question, answer.status_code, data)
        if not wrong and question.is_fixed and (first := load._answers.setdefault(question.key, text)) != text:
            wrong = f"answered {text[:200]!r} where {first[:200]!r} was the answer before"
        if wrong:
            load.fail(f"{wrong} ({'stream' if question.stream else 'whole'}, {question.model})", n)
        else:
            load.ok += 1
    except httpx.HTTPError as e:
        load.fail(f"{type(e).__name__}: {e} after {time.monotonic() - started:.3f} s ({question.model})", n)
    load.slowest_s = max(load.slowest_s, time.monotonic() - started)


@asynccontextmanager
async def steady(url: str, model: str | Sequence[str], *, per_s: float, tokens: int = 8, clients: int = 1) -> AsyncIterator[Load]:
    """Sends requests at a fixed rate, open loop, until the block ends; then waits for those under way.

    Args: model: of a plain load; several names make it a mixed one. clients: each keeps connections of its own open and is used in turn.
    """
    load = Load()
    limits = httpx.Limits(max_connections=2000, max_keepalive_connections=200)
    async with AsyncExitStack() as stack:
        users = [await stack.enter_async_context(httpx.AsyncClient(timeout=60, limits=limits)) for _ in range(clients)]
        stop = asyncio.Event()

        async def run() -> None:
            start = time.monotonic()
            while not stop.is_set():
                n = load.sent
                question = streamed(model, n, tokens) if isinstance(model, str) else mixed(model, n)
                task = asyncio.create_task(one(users[n % clients], url, question, n, load))
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
