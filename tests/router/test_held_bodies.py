"""Bodies of requests have one budget per edge: clients are slowed down, and refused only when their request is in memory already (R18)."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from fleet_router.http.held import PIECE, HeldBodies
from fleet_router.http.request import Request
from fleet_router.settings import BadFlag, parse
from fleet_testing.fake_worker import Script, sse
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until

MIB = 1 << 20
ANSWER_S = 90.0  # ends a test that hangs; no promise


def body_of(size: int) -> bytes:
    """A completion request of so many bytes."""
    empty = json.dumps({"model": "tiny", "prompt": ""}).encode()
    return empty[:-2] + b"x" * (size - len(empty)) + b'"}'


def head_of(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, header lines, JSON."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_S)).decode()
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
    return int(head.split()[1]), fields, json.loads(await reader.readexactly(int(fields["Content-Length"])))


def held(fleet: Fleet) -> int:
    """Bytes."""
    return fleet.edge.server_state.bodies.size_bytes


@pytest.mark.rule("R18")
async def test_large_bodies_wait_for_room_and_are_all_served(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """40 bodies through a budget of 8: without it all of them were held."""
    size = 128 << 10
    fleet = await make_fleet(await make_worker(), max_body_bytes=size, max_held_bytes=8 * size)
    most = 0

    async def one() -> int:
        reader, writer = await fleet.connect()
        body = body_of(size)
        writer.write(head_of(body))
        for at in range(0, size, size // 8):
            writer.write(body[at : at + size // 8])
            await asyncio.sleep(0.01)
        status, _, _ = await answer(reader)
        writer.close()
        return status

    tasks = [asyncio.create_task(one()) for _ in range(40)]
    while not all(t.done() for t in tasks):
        most = max(most, held(fleet))
        await asyncio.sleep(0.001)
    assert Counter(t.result() for t in tasks) == {200: 40}
    assert 7 * size < most < 20 * size  # a piece of each comes before it is stopped
    await until(lambda: held(fleet) == 0, "nothing is held")


@pytest.mark.rule("R18")
async def test_without_room_a_whole_request_is_refused_and_the_limit_is_named(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, max_body_bytes=MIB, max_held_bytes=MIB)
    go = asyncio.Event()
    worker.scripts.extend(Script(wait=go) for _ in range(2))
    big = [asyncio.create_task(fleet.post("/v1/completions", body_of(MIB - 1000 * n))) for n in range(2)]
    await until(lambda: held(fleet) > MIB, "there is no room any more")
    refused = await fleet.post("/v1/completions", body_of(100))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], refused.headers["retry-after"]) == (503, "bodies_full", "1")
    assert "--max-held-bytes" in error["message"] and str(MIB) in error["message"]
    assert (await fleet.http.get(f"{fleet.url}/livez")).status_code == 200
    assert fleet.counter("limits_total") == 1
    go.set()
    assert [r.status_code for r in await asyncio.gather(*big)] == [200, 200]
    assert (await fleet.post("/v1/completions", body_of(100))).status_code == 200
    await fleet.idle()
    assert held(fleet) == 0


async def test_whoever_waited_for_room_until_the_body_s_time_is_over_is_told_to_come_again(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, max_body_bytes=MIB, max_held_bytes=MIB, body_timeout=1.0)
    go = asyncio.Event()
    worker.scripts.append(Script(wait=go))
    first = asyncio.create_task(fleet.post("/v1/completions", body_of(MIB)))
    await until(lambda: bool(worker.legs), "it has its worker")
    reader, writer = await fleet.connect()
    writer.write(head_of(body := body_of(MIB // 2)) + body[:1000])
    status, fields, told = await answer(reader)
    assert (status, fields["Retry-After"], told["error"]["code"]) == (503, "1", "bodies_full")
    writer.close()
    go.set()
    assert (await first).status_code == 200


async def test_when_all_that_is_held_are_parts_the_first_gets_on(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), max_body_bytes=MIB, max_held_bytes=MIB)
    body = body_of(MIB)
    clients = []
    for n in range(1, 4):
        clients.append(await fleet.connect())
        clients[-1][1].write(head_of(body) + body[: MIB // 2])
        least = min(n * MIB // 2, MIB + 1)
        await until(lambda least=least: held(fleet) >= least, "it is here")  # type: ignore[misc]
    for _, writer in reversed(clients):
        writer.write(body[MIB // 2 :])
    assert [(await answer(reader))[0] for reader, _ in clients] == [200] * 3
    for _, writer in clients:
        writer.close()


async def test_clients_that_leave_in_the_middle_leave_no_bytes_behind(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, max_body_bytes=MIB, max_held_bytes=MIB)
    rng = random.Random(5)
    worker.default = Script(delay_s=0.01)

    async def one() -> None:
        _, writer = await fleet.connect()
        data = head_of(body := body_of(rng.randrange(100, MIB))) + body
        writer.write(data[: rng.randrange(len(data) + 1)])
        await asyncio.sleep(rng.random() * 0.1)
        writer.transport.abort()

    for _ in range(6):
        await asyncio.gather(*(one() for _ in range(20)))
    await until(lambda: held(fleet) == 0, "nothing is held")
    fleet.edge.server_state.bodies.check_integrity()
    assert (await fleet.post("/v1/completions", body_of(MIB))).status_code == 200
    await fleet.idle()


@pytest.mark.rule("R21")
@pytest.mark.parametrize("pair", [False, True])
async def test_a_stream_that_runs_holds_its_request_no_more(pair: bool, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker("prefill"), await make_worker("decode")] if pair else [await make_worker()]
    fleet = await make_fleet(*workers)
    go = asyncio.Event()
    workers[-1].scripts.append(Script(pieces=[sse({"t": 1}, done=False), sse({"t": 2})], wait_after=(1, go)))
    async with fleet.http.stream("POST", f"{fleet.url}/v1/chat/completions", json={"model": "tiny", "messages": [], "stream": True}) as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == sse({"t": 1}, done=False)
        assert held(fleet) == 0 and fleet.inflight() >= 1
        go.set()
        assert b"".join([c async for c in chunks]) == sse({"t": 2})
    await fleet.idle()


def test_the_budget_is_a_flag_and_comes_from_the_memory() -> None:
    static = ("--static", "http://a:1")
    assert parse(static).max_held_bytes >= 64 * MIB
    assert parse((*static, "--max-held-bytes", "100000000")).max_held_bytes == 100_000_000
    assert parse((*static, "--workers", "64")).max_held_bytes >= 64 * 64 * MIB
    with pytest.raises(BadFlag, match=f"--max-held-bytes is 100; at least .* {128 * MIB}, is needed"):
        parse((*static, "--max-held-bytes", "100", "--workers", "2"))


class ModelReader:
    """A connection that is told to stop and to go on."""

    def __init__(self) -> None:
        self.reads = True

    def stop_reading(self) -> None:
        assert self.reads
        self.reads = False

    def read_on(self) -> None:
        assert not self.reads
        self.reads = True


@pytest.mark.parametrize("seed", range(20))
def test_there_is_always_one_that_is_read_from_and_the_sum_is_right(seed: int) -> None:
    rng, limit, most = random.Random(seed), 10 * PIECE, 4 * PIECE
    refused: list[str] = []
    bodies = HeldBodies(limit, refused.append)
    reading: dict[ModelReader, int] = {}
    whole: list[Request] = []
    for _ in range(3000):
        match rng.randrange(5):
            case 0 | 1 | 2:
                can = [r for r in reading if r.reads] + [ModelReader()]
                reader = rng.choice(can)
                got = rng.randrange(1, PIECE)
                bodies.add(got)
                reading[reader] = reading.get(reader, 0) + got
                if reading[reader] >= most or rng.random() < 0.2:
                    request = Request(None, True, "", bytes(reading.pop(reader)))  # type: ignore[arg-type]
                    bodies.hold(reader, request)
                    if request.held_bytes:
                        whole.append(request)
                else:
                    bodies.in_the_middle(reader)
            case 3 if whole:
                bodies.let_go(whole.pop(rng.randrange(len(whole))))
            case 4 if reading and rng.random() < 0.2:
                reader = rng.choice(list(reading))
                bodies.leave(reader)
                bodies.free(reading.pop(reader))
        assert bodies.size_bytes == sum(reading.values()) + sum(r.held_bytes for r in whole)
        assert not reading or whole or next(iter(reading)).reads, "the first is read from"
        room = PIECE * (1 + len(bodies._let_on))
        assert all(r.reads for r in reading) or bodies.size_bytes > limit - room, "nobody waits while there is room"
    for reader, count in list(reading.items()):
        bodies.leave(reader)
        bodies.free(count)
    for request in whole:
        bodies.let_go(request)
    bodies.check_integrity()
    assert refused
