"""Streams through the router: bytes, usage at any split, what a slow reader costs (R21, R22)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import pytest

from fleet_contract.errors import ApiError
from fleet_router.engines.base import Alone
from fleet_router.http.client import Pool, Sink
from fleet_testing.fake_worker import Script, sse
from fleet_testing.router_fleet import MakeFleet, MakeWorker
from fleet_testing.router_process import until

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 7}}
WITH_USAGE = sse({"choices": [{"index": 0, "delta": {"content": "é"}}]}, {"choices": [], "usage": USAGE})


@pytest.mark.rule("R22")
@pytest.mark.case("C44")
async def test_usage_is_found_wherever_the_stream_is_split(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """Red with the last piece alone in `tail` of `Attempt._learn_from_stream`."""
    worker = await make_worker()
    fleet = await make_fleet(worker)
    for at in range(1, len(WITH_USAGE)):
        worker.scripts.append(Script(pieces=[WITH_USAGE[:at], WITH_USAGE[at:]]))
        assert (await fleet.chat(stream=True)).content == WITH_USAGE
        assert fleet.counter("cached_tokens_total") == 7 * at, f"not seen when split at {at}"


class Noted(Sink):
    """A sink that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.pieces: list[bytes] = []

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.heard.append(f"head {status}")

    def on_body(self, data: bytes) -> None:
        self.heard.append("body")
        self.pieces.append(data)

    def on_end(self) -> None:
        self.heard.append("end")

    def on_lost(self, error: ApiError) -> None:
        self.heard.append(error.code)


@pytest.mark.rule("R21")
@pytest.mark.parametrize(("last", "end"), [(b"0\r\n\r\n", "end"), (b"no chunk\r\n", "worker_lost")])
async def test_events_that_come_together_go_on_together(last: bytes, end: str) -> None:
    """A slow reader's transport keeps each write as an object of its own: a hundred small ones took four times their bytes."""
    events = [sse({"n": n}, done=False) for n in range(100)]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = head + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + last

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool, noted = Pool(), Noted()
    pool.start("127.0.0.1", server.sockets[0].getsockname()[1], (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",), noted)
    await until(lambda: noted.heard[-1:] == [end], "the answer has ended")
    assert b"".join(noted.pieces) == b"".join(events)
    assert noted.heard[0] == "head 200" and noted.heard[1:-1] == ["body"] * len(noted.pieces)
    assert len(noted.pieces) <= 4, "as many as were read from the socket at most"
    await pool.close()
    server.close()


@pytest.mark.rule("R21")
def test_a_request_that_was_sent_is_not_kept_with_its_stream() -> None:
    parts = (b"head", b"x" * 1000)
    count = sys.getrefcount(parts)
    alone = Alone(cast(Any, None), parts)
    assert [sent for _, sent in alone.first()] == [parts]
    assert sys.getrefcount(parts) == count
