"""Load against a scripted server whose clock is ours: latencies are exact, whatever the machine does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleet_bench.client import Client, Endpoint
from fleet_bench.datasets import Session, Turn
from fleet_bench.exchange import Target
from fleet_bench.load import Run, closed_loop, open_loop
from fleet_bench.record import Record
from fleet_bench.stats import summarise


class VirtualClock:
    """Stands still until someone moves it; counts how often it was read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return chunk(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")


def token(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}})


END = event(b"[DONE]") + b"0\r\n\r\n"


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[tuple[Endpoint, list[dict[str, Any]]]]:
    """Yields where it listens and the bodies it got."""
    bodies: list[dict[str, Any]] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(next(line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")))
                body = json.loads(await reader.readexactly(length) or b"{}")
                bodies.append(body)
                await answer(body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Endpoint("127.0.0.1", listening.sockets[0].getsockname()[1]), bodies
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running(answer: Answer, clock: Callable[[], float], **target: Any) -> AsyncIterator[tuple[Run, list[dict[str, Any]]]]:
    async with server(answer) as (endpoint, bodies):
        client = Client(endpoint, headers={"Authorization": "Bearer k"}, clock=clock)
        yield Run(client, Target("m", "chat", **target), clock), bodies
        client.close()


def sessions(count: int, turns: int = 1) -> list[Session]:
    return [Session([Turn(f"question {n}.{t}", 4) for t in range(turns)]) for n in range(count)]


async def test_times_are_those_of_the_schedule() -> None:
    clock = VirtualClock()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for after_s, data in [(0.25, HEAD), (0.25, token("a")), (0.125, token("b")), (0.5, token("c") + usage(7, 3, 2)), (0.125, END)]:
            seen = clock.reads
            clock.now += after_s
            writer.write(data)
            while clock.reads == seen:  # until the client has taken it
                await asyncio.sleep(0)

    async with running(answer, clock) as (run, _):
        await closed_loop(run, iter(sessions(2)), concurrency=1)
    for r in run.records:
        assert (r.error, r.ttft_s, r.e2e_s, r.itl_s) == (None, 0.5, 1.25, [0.125, 0.5])
        assert r.first_byte_s is not None and r.first_byte_s - r.origin_s == 0.25
        assert (r.prompt_tokens, r.completion_tokens, r.cached_tokens) == (7, 3, 2)
    s = summarise(run.records)
    assert (s.duration_s, s.output_tokens_per_s) == (2.5, 6 / 2.5)


async def test_latency_counts_from_when_a_request_was_due_not_from_when_it_could_be_sent() -> None:
    clock = VirtualClock()

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        await asyncio.sleep(0)

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        while clock.now < 102:  # all three are due before the first is answered
            await asyncio.sleep(0)
        clock.now += 10
        writer.write(HEAD + token("a") + END)

    async with running(answer, clock) as (run, _):
        await open_loop(run, zip((0.0, 1.0, 2.0), sessions(3), strict=True), max_open=1, sleep=sleep)
    assert [r.origin_s for r in run.records] == [100.0, 101.0, 102.0]
    assert [r.e2e_s for r in run.records] == [12.0, 21.0, 30.0]  # a closed loop would say 10 each
    assert [r.sent_s for r in run.records[1:]] == [112.0, 122.0]


async def test_open_loop_begins_a_request_although_none_was_answered() -> None:
    clock, release = VirtualClock(), asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(bodies) == 5:
            release.set()
        await release.wait()
        writer.write(HEAD + token("a") + END)

    async with running(answer, clock) as (run, bodies):
        async with asyncio.timeout(60):
            await open_loop(run, ((0.0, s) for s in sessions(5)))
    assert [r.ok for r in run.records] == [True] * 5


async def test_a_closed_loop_keeps_so_many_open_and_no_more() -> None:
    clock, open_now, most = VirtualClock(), 0, 0

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        for _ in range(20):
            await asyncio.sleep(0)
        open_now -= 1
        writer.write(HEAD + token("a") + END)

    async with running(answer, clock) as (run, _):
        await closed_loop(run, iter(sessions(12)), concurrency=3)
    assert (most, len(run.records)) == (3, 12)


async def test_a_conversation_sends_what_was_answered_before() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token(f"answer {len(body['messages'])}") + END)

    async with running(answer, VirtualClock()) as (run, bodies):
        await closed_loop(run, iter(sessions(1, turns=3)), concurrency=2)
    said = [[m["content"] for m in b["messages"]] for b in bodies]
    assert said[2] == ["question 0.0", "answer 1", "question 0.1", "answer 3", "question 0.2"]
    assert [(r.session, r.turn) for r in run.records] == [(0, 0), (0, 1), (0, 2)]


async def refuse(writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 7\r\n\r\n{"a":1}')


async def break_off(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + token("a"))
    await writer.drain()
    writer.close()


async def no_done(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + token("a") + b"0\r\n\r\n")


async def error_event(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + token("a") + event({"error": {"message": "no"}}) + b"0\r\n\r\n")


async def nonsense(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(b"{nonsense") + END)


async def silence(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (refuse, "http 503"), (break_off, "connection lost"), (no_done, "truncated"), (error_event, "error event"),
        (nonsense, "bad answer"), (silence, "timeout"),
    ],
)  # fmt: skip
async def test_each_kind_of_failure_is_named_and_the_load_goes_on(act: Callable[[asyncio.StreamWriter], Awaitable[None]], error: str) -> None:
    calls = 0

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await act(writer)
        else:
            writer.write(HEAD + token("a") + END)

    async with running(answer, VirtualClock(), timeout_s=0.3 if act is silence else 20) as (run, _):
        await closed_loop(run, iter(sessions(2)), concurrency=1)
    assert [r.error for r in run.records] == [error, None]
    assert run.records[0].message


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    async with server(lambda body, writer: asyncio.sleep(0)) as (endpoint, _):
        pass
    run = Run(Client(endpoint, headers={}, clock=VirtualClock()), Target("m", "chat"), VirtualClock())
    await closed_loop(run, iter(sessions(1)), concurrency=1)
    assert [r.error for r in run.records] == ["connect"]


async def test_a_kept_connection_that_the_server_closed_is_replaced_without_an_error() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token("a") + END)  # keep-alive by HTTP/1.1, but closed all the same
        await writer.drain()
        writer.close()

    async with running(answer, VirtualClock()) as (run, _):
        await closed_loop(run, iter(sessions(5)), concurrency=1)
    assert [r.error for r in run.records] == [None] * 5


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: " + json.dumps({"choices": [{"text": "a"}]}).encode() + b"\n\ndata: [DONE]\n\n"
        )
        await writer.drain()
        writer.close()

    async with running(answer, VirtualClock()) as (run, _):
        await closed_loop(run, iter(sessions(2)), concurrency=1)
    assert [(r.error, r.output_tokens) for r in run.records] == [(None, 1)] * 2


async def test_only_what_openai_knows_is_sent_unless_asked_for() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token("a") + END)

    async with running(answer, VirtualClock()) as (run, bodies):
        await closed_loop(run, iter(sessions(1)), concurrency=1)
    assert set(bodies[0]) == {"model", "stream", "max_tokens", "messages", "temperature", "stream_options"}
    async with running(answer, VirtualClock(), ignore_eos=True, usage=False, extra={"top_k": 1}) as (run, bodies):
        await closed_loop(run, iter(sessions(1)), concurrency=1)
    assert set(bodies[0]) == {"model", "stream", "max_tokens", "messages", "temperature", "ignore_eos", "top_k"}


def test_a_record_without_text_events_has_no_first_token() -> None:
    assert Record(0, 0, 0, 1.0).ttft_s is None
