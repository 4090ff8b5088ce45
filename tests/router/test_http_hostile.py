"""Bytes that are made to hurt: smuggling, drips, floods. Beside test_http_abuse.py; the router reads none of them otherwise than RFC 9112 says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tracemalloc

import psutil
import pytest

from fleet_router.http.server import MAX_WAITING_BYTES
from fleet_testing import fuzz_router, http_reference
from fleet_testing.fake_worker import Script
from fleet_testing.router_fleet import MakeFleet, MakeWorker
from fleet_testing.router_process import LIMIT_S, RouterProcess, until

BODY = json.dumps({"model": "tiny", "prompt": "x"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
HIDDEN = b"POST /v1/completions HTTP/1.1\r\nHost: hidden\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
LAST = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def statuses(answer: bytes) -> list[int]:
    return [int(m.start[0]) for m in http_reference.answers(answer).messages]


def refused(answer: bytes, status: int = 400) -> str:
    """The one answer that refuses, and the end. Gives its words."""
    (message,) = http_reference.answers(answer).messages
    assert message.start == (b"%d" % status,) and message.ends, message
    return str(json.loads(message.body)["error"]["message"])


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX" + HIDDEN,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding: chunked\x00\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"X: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Transfer-Encoding\x00: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
        HEAD + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length: \r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length: 1_0\r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length: 18446744073709551616\r\n\r\n" + HIDDEN,
        HEAD + b"Content-Length: 0\r\n \r\n" + HIDDEN,
        HEAD + b"Host: y\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
        HEAD.replace(b"Host: x", b"Host: a b") + b"Content-Length: 0\r\n\r\n" + HIDDEN,
        HEAD.replace(b"Host: x", b"Host: a/../b") + b"Content-Length: 0\r\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n0\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n5;a\nb\r\nhello\r\n0\r\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n5\r\nhello0\r\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n5\r\nhello\n0\r\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n+0\r\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n0x0\r\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n10000000000000000\r\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n0\r\nContent-Length: 50\r\n\r\n" + HIDDEN,
        CHUNKED + b"\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN,
    ],
    ids=lambda d: repr(d[37:110]),
)
async def test_no_request_is_smuggled(data: bytes, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    for cut in (len(data), len(data) // 2, len(data) - 3):
        reader, writer = await fleet.connect()
        writer.write(data[:cut])
        await asyncio.sleep(0.002)
        writer.write(data[cut:])
        refused(await asyncio.wait_for(reader.read(), LIMIT_S))
        writer.close()
    assert worker.legs == []


async def test_a_head_that_was_read_before_hides_nothing_the_second_time(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    good = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    reader, writer = await fleet.connect()
    for _ in range(3):
        writer.write(good)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await reader.readexactly(len(b'{"choices": [{"text": "hello"}], "usage": {"prompt_tokens": 1}}'))
    for data in (good + HIDDEN, good[:-5], good + b"\r\n\r\n", b"\r\n" + good, good.replace(b"\r\n\r\n", b"\r\n\r\n\r\n", 1)):
        before = len(worker.legs)
        answer = await fleet.raw(data + LAST)
        sent = http_reference.requests(data + LAST)
        assert len(statuses(answer)) <= len(sent.messages) + 1
        assert {leg.body[: len(BODY)] for leg in worker.legs[before:]} <= {m.body for m in sent.messages}, data
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        CHUNKED + b"\r\nffffffffffffffff\r\n" + b"x" * 30_000,
        CHUNKED + b"\r\n" + b"1\r\nx\r\n" * 30_000,
    ],
    ids=["a chunk of 16 EiB", "many small chunks"],
)
async def test_a_body_in_chunks_ends_at_the_limit(data: bytes, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), max_body_bytes=20_000)
    assert "--max-body-bytes" in refused(await fleet.raw(data), 413)


@pytest.mark.parametrize(
    "chunk",
    [b"1;" + b"e" * 3000 + b"\r\nx\r\n", b"0" * 3000 + b"1\r\nx\r\n", b"1;" + b"e" * 20_000_000 + b"\r\nx\r\n"],
    ids=["extensions", "zeros", "one extension"],
)
async def test_what_is_between_chunks_is_bounded_too(chunk: bytes, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    assert "chunk" in refused(await fleet.raw(CHUNKED + b"\r\n" + chunk * max(1, 20_000_000 // len(chunk))))


async def test_a_body_in_tiny_chunks_costs_little_more_than_its_bytes(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), max_body_bytes=8 << 20)
    _, writer = await fleet.connect()
    writer.write(CHUNKED + b"\r\n")
    tracemalloc.start()
    try:
        for _ in range(32):
            writer.write(b"2\r\nab\r\n" * 8192)
            await writer.drain()
        (protocol,) = fleet.edge.server_state.connections
        await until(lambda: protocol._body_bytes == 2 * 8192 * 32, "all of it is here")
        assert tracemalloc.get_traced_memory()[0] < 4 * (2 * 8192 * 32)
    finally:
        tracemalloc.stop()
        writer.close()


async def test_offers_to_upgrade_without_end_are_answered_one_by_one(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    offer = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n"
    assert statuses(await fleet.raw(offer * 3000 + LAST, 30)) == [200] * 3001


async def test_empty_lines_do_not_keep_a_connection(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), head_timeout=0.4, idle_timeout=0.4)
    for first in (b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"):
        reader, writer = await fleet.connect()
        writer.write(first)

        async def drip(writer: asyncio.StreamWriter = writer) -> None:
            while True:
                writer.write(b"\r\n")
                await asyncio.sleep(0.02)

        task = asyncio.create_task(drip())
        try:
            with contextlib.suppress(ConnectionError):  # it has ended while a line was on its way
                await asyncio.wait_for(reader.read(), LIMIT_S)
        finally:
            task.cancel()
            writer.close()


async def test_slow_clients_by_the_hundred_hinder_nobody(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """Slow loris: heads and bodies that come a byte at a time."""
    fleet = await make_fleet(await make_worker(), head_timeout=3.0, body_timeout=3.0)
    whole = [HEAD, HEAD + b"Content-Length: 900\r\n\r\n" + b"x" * 100, CHUNKED + b"\r\n5\r\nab"]

    async def drip(data: bytes, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # the router has ended it
            writer.write(data[:-20])
            for byte in data[-20:]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.3)

    def half_requests() -> int:
        return sum(c._in_message for c in fleet.edge.server_state.connections)

    async def told(number: int) -> list[int]:
        """Sends until there is an answer, as a client does: bytes that meet a closed socket would cost it the answer."""
        reader, writer = await fleet.connect()
        sending = asyncio.create_task(drip(whole[number % 3], writer))
        answer = await asyncio.wait_for(reader.read(1 << 16), LIMIT_S)
        sending.cancel()
        answer += await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        return statuses(answer)

    clients = [asyncio.create_task(told(n)) for n in range(300)]
    await until(lambda: half_requests() > 100, "they are in the middle")
    assert [(await fleet.post("/v1/completions", BODY)).status_code for _ in range(10)] == [200] * 10
    assert await asyncio.gather(*clients) == [[408]] * 300
    await until(lambda: not half_requests(), "no half request is kept")
    assert (await fleet.post("/v1/completions", BODY)).status_code == 200


async def test_a_flood_of_pipelined_bodies_is_not_taken_into_memory(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    gate = asyncio.Event()
    worker.scripts.append(Script(wait=gate))
    big = json.dumps({"model": "none", "prompt": "x" * 1_000_000}).encode()
    one = HEAD + b"Content-Length: %d\r\n\r\n" % len(big) + big
    reader, writer = await fleet.connect()
    writer.write(HIDDEN)
    await until(lambda: bool(worker.legs), "the first is with the worker")
    sending = asyncio.create_task(flood(writer, one, 24))
    (protocol,) = [c for c in fleet.edge.server_state.connections if c.exchange is not None]
    await until(lambda: bool(protocol._waiting), "some wait")
    await asyncio.sleep(0.3)
    assert sum(len(r.body) for r in protocol._waiting) + protocol._body_bytes <= MAX_WAITING_BYTES + 2 * len(one)
    gate.set()
    assert statuses(await asyncio.wait_for(reader.read(), LIMIT_S)) == [200, *[404] * 24, 200]
    await sending
    writer.close()


async def flood(writer: asyncio.StreamWriter, data: bytes, times: int) -> None:
    for _ in range(times):
        writer.write(data)
        await writer.drain()
    writer.write(LAST)


async def test_the_forms_of_a_target(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    for target, status in (
        (b"http://elsewhere/livez", 200), (b"HTTPS://elsewhere:99/livez?a=b", 200), (b"http://elsewhere", 404), (b"*", 404), (b"//livez", 404),
    ):  # fmt: skip
        assert statuses(await fleet.raw(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)) == [status], target
    assert "CONNECT" in refused(await fleet.raw(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n" + HIDDEN * 50), 405)
    answer = await fleet.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 3 + b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n" + HIDDEN)
    assert statuses(answer) == [200, 200, 200, 405]
    assert refused(await fleet.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))


async def test_expect_continue_behind_another_request_is_answered_when_it_is_its_turn(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    gate = asyncio.Event()
    worker.scripts.append(Script(wait=gate))
    reader, writer = await fleet.connect()
    writer.write(HIDDEN + HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
    await until(lambda: bool(worker.legs), "the first is with the worker")
    gate.set()
    assert (await asyncio.wait_for(reader.readuntil(b"}}"), LIMIT_S)).startswith(b"HTTP/1.1 200")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), LIMIT_S)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_slow_reader_of_the_last_answer_gets_all_of_it(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """What it may not do is to stop."""
    worker = await make_worker()
    fleet = await make_fleet(worker, write_timeout=1.0)
    worker.default = Script(body=b'"' + b"x" * 20_000_000 + b'"')
    reader, writer = await fleet.connect()
    writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
    got, pauses = 0, 0
    while data := await asyncio.wait_for(reader.read(1 << 20), LIMIT_S):
        got += len(data)
        if pauses < 15:
            pauses += 1
            await asyncio.sleep(0.1)
    assert got > 20_000_000
    writer.close()


async def test_what_a_client_sends_behind_its_last_request_does_not_cost_it_the_answer(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    for _ in range(30):
        reader, writer = await fleet.connect()
        writer.write(LAST)
        await asyncio.sleep(0.003)
        writer.write(LAST)
        await asyncio.sleep(0.003)
        writer.write(LAST)
        assert statuses(await asyncio.wait_for(reader.read(), LIMIT_S)) == [200]
        writer.close()


# -- at random


async def test_a_storm_of_bad_bytes_gets_only_proper_answers(make_worker: MakeWorker, make_router: object) -> None:
    """The small form of `make fuzz-router`."""
    worker = await make_worker()
    router: RouterProcess = await make_router("--static", worker.url, *fuzz_router.FLAGS)  # type: ignore[operator]
    await router.until_workers(1)
    pids = [p.pid for p in psutil.Process(router.process.pid).children()]
    found = await fuzz_router.storm(router, worker, 400, seed=7)
    assert found.faults == [], "\n".join(found.faults[:5])
    assert found.statuses["200"] > 20 and found.statuses["400"] > 100
    assert await fuzz_router.settled(router) == []
    assert pids == [p.pid for p in psutil.Process(router.process.pid).children()]
    assert "Traceback" not in router.log.read_text()


def test_the_judge_of_the_storm_sees_faults() -> None:
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    bad = b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    smuggled = HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + get
    assert fuzz_router.judge(get, ok) is None and fuzz_router.judge(get, bad) is None and fuzz_router.judge(smuggled, bad) is None
    assert fuzz_router.judge(smuggled, ok) and fuzz_router.judge(get, ok + ok) and fuzz_router.judge(get, bad + ok)
    assert (
        fuzz_router.judge(get + get, ok) and fuzz_router.judge(get, b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n") and fuzz_router.judge(get, b"x")
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_reads_what_is_well_made(seed: int) -> None:
    rng = random.Random(seed)
    bodies = [bytes(rng.randrange(256) for _ in range(rng.randrange(60))) for _ in range(20)]
    data = b""
    for body in bodies:
        if rng.random() < 0.5:
            data += HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        else:
            cut = rng.randrange(len(body) + 1)
            data += CHUNKED + b"\r\n" + b"".join(b"%x;e=f\r\n%b\r\n" % (len(p), p) for p in (body[:cut], body[cut:]) if p) + b"0\r\nT: v\r\n\r\n"
    reading = http_reference.requests(data)
    assert [m.body for m in reading.messages] == bodies and reading.rest == "clean"
    assert http_reference.requests(data[:-1]).rest == "unfinished"
