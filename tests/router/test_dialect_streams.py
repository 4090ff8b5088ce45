"""Streams of each dialect pass unchanged, are complete when their own last event says so, and get an error in their own words when they are not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fleet_contract.errors import ApiError
from fleet_router.api.dialects import ANTHROPIC, OLLAMA, OPENAI, RESPONSES, Dialect, dialect_of, last_number
from fleet_testing.fake_worker import Script
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until


def event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def line(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


CLAUDE = (
    event("message_start", message={"usage": {"input_tokens": 3, "cache_read_input_tokens": 16}}) + event("ping"),
    event("content_block_delta", delta={"text": "message_stop\n"}),
    event("message_delta", usage={"input_tokens": 3, "cache_read_input_tokens": 16, "output_tokens": 2}) + event("message_stop"),
)
LLAMA = (line(response='"done":true', done=False), line(response="", tool_calls=[{"done": True}], done=False), line(done=True, eval_count=2))
SHAPES: list[tuple[Dialect, tuple[bytes, ...], int | None, int]] = [
    (ANTHROPIC, CLAUDE, 16, 2),
    (OLLAMA, LLAMA, None, 2),
    (OPENAI, (b'data: {"a":1}\n\n', b'data: {"usage":{"completion_tokens":7,"x":{"cached_tokens":32}}}\n\n', b"data: [DONE]\n\n"), 32, 7),
]


@pytest.mark.parametrize(("dialect", "parts", "cached", "made"), SHAPES)
def test_a_whole_stream_is_known_by_its_last_event_alone(dialect: Dialect, parts: tuple[bytes, ...], cached: int | None, made: int) -> None:
    for n, part in enumerate(parts):
        assert dialect.event_end(part) == len(part) and dialect.event_end(part + b"x") == len(part)
        assert dialect.last_words(part) == (n == len(parts) - 1, False), part
        assert dialect.last_words(b"".join(parts[: n + 1])) == (n == len(parts) - 1, False)
    whole = b"".join(parts)
    assert (dialect.cached_tokens(whole), dialect.made_tokens(whole)) == (cached, made)
    assert dialect.events(whole) == {"anthropic": 5, "ollama": 3, "openai": 3}[dialect.name]


@pytest.mark.parametrize("dialect", [OPENAI, ANTHROPIC, OLLAMA, RESPONSES])
def test_an_error_in_a_stream_is_known_as_one(dialect: Dialect) -> None:
    said = dialect.error_event(ApiError(502, "gone", type="server_error", code="worker_lost"), "req-1")
    assert dialect.event_end(said) == len(said) and dialect.last_words(said) == (False, True)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/api/x", "ollama"),
        ("/v1/responses", "responses"),
        ("/", "openai"),
    ],
)
def test_a_path_s_dialect(path: str, name: str) -> None:
    assert dialect_of(path).name == name


PATHS = [("/v1/messages", CLAUDE, "text/event-stream"), ("/api/chat", LLAMA, "application/x-ndjson")]
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}


async def read(fleet: Fleet, path: str) -> tuple[bytes, bool]:
    """A streamed answer's bytes, and whether HTTP says that it is complete."""
    got = b""
    try:
        async with fleet.http.stream("POST", fleet.url + path, json=BODY) as response:
            async for chunk in response.aiter_raw():
                got += chunk
    except httpx.RemoteProtocolError:
        return got, False
    return got, True


@pytest.mark.parametrize(("path", "parts", "kind"), PATHS)
async def test_a_stream_is_passed_on_unchanged_wherever_it_is_cut(
    make_worker: MakeWorker, make_fleet: MakeFleet, path: str, parts: tuple[bytes, ...], kind: str
) -> None:
    workers = [await make_worker("prefill"), await make_worker("decode")]
    fleet = await make_fleet(*workers)
    whole = b"".join(parts)
    for cut in range(1, len(whole), 7):
        workers[1].scripts.append(Script(pieces=[whole[:cut], whole[cut:]], stream_type=kind))
        assert await read(fleet, path) == (whole, True)
    assert len(workers[0].legs) == len(workers[1].legs) > 10 and all(leg.ids for w in workers for leg in w.legs)
    await fleet.idle()


@pytest.mark.parametrize(("path", "parts", "kind"), PATHS)
async def test_a_stream_without_its_last_event_ends_with_an_error_in_its_own_words(
    make_worker: MakeWorker, make_fleet: MakeFleet, path: str, parts: tuple[bytes, ...], kind: str
) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    for script in (Script(pieces=list(parts[:2]), stream_type=kind), Script(pieces=list(parts[:2]), stream_type=kind, truncate=True)):
        worker.scripts.append(script)
        got, complete = await read(fleet, path)
        begin = b"".join(parts[:2])
        assert not complete and got.startswith(begin)
        told = json.loads(got[len(begin) :].removeprefix(b"event: error\ndata: "))
        message = told["error"] if path == "/api/chat" else told["error"]["message"]
        assert "worker" in message
    await fleet.idle()


@pytest.mark.parametrize(("path", "parts", "kind"), PATHS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.rule("R20")
async def test_a_client_that_leaves_ends_both_legs_of_any_dialect(
    make_worker: MakeWorker, make_fleet: MakeFleet, path: str, parts: tuple[bytes, ...], kind: str, stream: bool
) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    prefill.scripts.append(Script(wait=asyncio.Event()))
    decode.scripts.append(Script(wait=asyncio.Event()))
    task = asyncio.create_task(fleet.post(path, {**BODY, "stream": stream}))
    await until(lambda: bool(prefill.legs and decode.legs), "both have it")
    task.cancel()
    await until(lambda: len(prefill.aborts) == len(decode.aborts) == 1, "both are told")
    assert prefill.aborts == decode.aborts == [prefill.legs[0].routed.rid]
    await fleet.idle()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b'{"n": 12}', 12), (b'{"n":12,', 12), (b'{"n":3},{"n":  7 }', 7), (b'{"n":1.5}', None), (b'{"n":-1}', None), (b'{"n":null}', None),
        (b'{"n":', None), (b'{"n":5', 5), (b'{"m":5}', None), (b'{"n":123456789012}', None), (b'{"n":12345678901}', 12345678901), (b'{"n":7\n}', 7),
        (b'{"n":\n 5}', 5),
    ],
)  # fmt: skip
def test_the_last_number_of_a_name(text: bytes, number: int | None) -> None:
    assert last_number(text, b'"n":') == number


@pytest.mark.parametrize(
    ("data", "end", "events"),
    [
        (b"data: a\n\n", 9, 1), (b"data: a\n\ndata: b\n\n", 18, 2), (b"data: a\n\ndata: b", 9, 1), (b"event: x\ndata: a\n\n", 18, 1),
        (b"data: a\r\n\r\n", 11, 1), (b"data: a\r\n\r\ndata: b\r\n\r\nda", 22, 2), (b"data", 0, 0), (b"\n\n", 2, 1),
    ],
)  # fmt: skip
def test_whole_events_and_their_number(data: bytes, end: int, events: int) -> None:
    assert OPENAI.event_end(data) == end
    assert OPENAI.events(data[:end]) == events


@pytest.mark.parametrize("data", [b"x", b"ab", b"abc\nx", b""])
def test_a_piece_of_an_event_is_no_event(data: bytes) -> None:
    assert OPENAI.events(data) == 0
