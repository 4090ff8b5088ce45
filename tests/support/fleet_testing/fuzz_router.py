"""`make fuzz-router`: thousands of connections with bytes that nobody should send, to a real router in front of a scripted worker.

    python -m fleet_testing.fuzz_router [--connections N] [--seed S]

What the router made of each is compared with a reading of the same bytes by the letter (`http_reference`): never more requests than there
are, never another body at the worker than one that was sent, only proper answers or a closed connection. At the end the same processes
live, no connection is open and the edge's memory is what it was. `storm` is the part that `make test` runs in small.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from fleet_contract import names
from fleet_testing import http_reference
from fleet_testing.fake_worker import FakeWorker, Received
from fleet_testing.router_process import RouterProcess

MAX_GROWTH_BYTES: Final = 12 << 20
MAX_BODY: Final = 20_000
FLAGS: Final = (
    "--head-timeout",
    "0.5",
    "--body-timeout",
    "0.5",
    "--idle-timeout",
    "0.5",
    "--max-body-bytes",
    str(MAX_BODY),
    "--max-head-bytes",
    "4096",
)
REFUSALS: Final = (400, 404, 405, 408, 413, 415, 417, 431, 505)
ANSWER_LIMIT_S: Final = 30.0
_FIELDS: Final = (
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding: chunked\r\n , identity", b"Transfer-Encoding: \"chunked\"", b"transfer-encoding:CHUNKED",
    b"Transfer-Encoding: x, chunked", b"Transfer-Encoding: chunked;q=1", b"X: a\r\nTransfer-Encoding: chunked", b"X: a\nTransfer-Encoding: chunked",
    b"X: a\rTransfer-Encoding: chunked", b"Transfer_Encoding: chunked", b"Content-Length: 0", b"Content-Length: 5", b"Content-Length: +5",
    b"Content-Length: 5, 5", b"Content-Length: 0x5", b"Content-Length: 1_0", b"Content-Length: -1", b"Content-Length: 18446744073709551621",
    b"Content-Length:", b"Content_Length: 5", b"Content-Length : 5", b"Content-Length: 00000000000000000005", b"Connection: close",
    b"Connection: keep-alive", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk", b"Connection: upgrade\r\nUpgrade: websocket",
    b"Connection: content-length", b"Connection: transfer-encoding", b"Expect: 100-continue", b"Expect: 200-ok", b"Host: y", b"Host: a b",
    b"X-Radixfleet-Rid: 1", b"Content-Encoding: gzip", b"Content-Type: text/plain", b"A: " + b"a" * 3000, b"B: \x00", b": x", b"Trailer: X",
    b"TE: trailers", b"X-HTTP-Method-Override: DELETE", b"X-Request-Id: \xff\xfe", b"Cookie: " + b"c=d; " * 200,
)  # fmt: skip
_LINES: Final = (
    b"GET /livez HTTP/1.1", b"GET http://evil/livez HTTP/1.1", b"GET /livez HTTP/1.0", b"GET /livez HTTP/0.9", b"GET /livez HTTP/2.0", b"GET /livez",
    b"OPTIONS * HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"HEAD /v1/models HTTP/1.1", b"PRI * HTTP/2.0", b"TRACE / HTTP/1.1", b"get /livez HTTP/1.1",
    b"GET /livez RTSP/1.0", b"GET /%00%0d%0a HTTP/1.1", b"GET /" + b"a" * 3000 + b" HTTP/1.1", b"GET /livez?a=" + b"b" * 500 + b" HTTP/1.1",
    b"GET /../../livez HTTP/1.1", b"POST /v1/models HTTP/1.1", b"PUT /v1/completions HTTP/1.1", b"GET /v1/models/tiny HTTP/1.1", b"\x16\x03\x01\x02",
)  # fmt: skip


@dataclass(slots=True)
class Found:
    """What came of one storm."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def connection(rng: random.Random, number: int) -> bytes:
    """The bytes of one connection: some requests, most of them good, and then damage."""
    data = b"".join(_request(rng, f"{number}.{n}") for n in range(rng.choice((1, 1, 2, 3, 6))))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        data = _damage(data, rng)
    return data


def _request(rng: random.Random, name: str) -> bytes:
    body = json.dumps({"model": rng.choice(("tiny", "tiny", "none")), "prompt": name, "stream": rng.random() < 0.2}).encode()
    kind = rng.random()
    if kind < 0.35:
        line, framing = rng.choice(_LINES), []
        body = b""
    elif kind < 0.7:
        line, framing = b"POST /v1/completions HTTP/1.1", [b"Content-Length: %d" % len(body)]
    else:
        line, framing = b"POST /v1/completions HTTP/1.1", [b"Transfer-Encoding: chunked"]
        body = _chunked(body, rng)
    fields = [b"Host: x", *framing, *rng.sample(_FIELDS, rng.choice((0, 0, 0, 1, 1, 2)))]
    if rng.random() < 0.2:
        rng.shuffle(fields)
    return line + b"\r\n" + b"".join(f + b"\r\n" for f in fields) + b"\r\n" + body


def _chunked(body: bytes, rng: random.Random) -> bytes:
    out, at = b"", 0
    while at < len(body):
        size = rng.randrange(1, 40)
        piece = body[at : at + size]
        extension = rng.choice((b"", b"", b"", b";a", b";a=b", b';a="b c"', b" ;a", b";" + b"e" * 300, b";\n", b";a\rb"))
        digits = rng.choice((b"%x", b"%x", b"%X", b"00%x", b"0x%x", b"%x ")) % len(piece)
        out += digits + extension + b"\r\n" + piece + rng.choice((b"\r\n",) * 12 + (b"\n", b"", b"\r\n\r\n"))
        at += size
    end = rng.choice((b"0", b"0", b"0", b"000", b"0;x", b"ffffffffffffffff", b"-0", b""))
    trailer = rng.choice(
        (b"", b"", b"", b"X: y\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"X-Radixfleet-Room: 1\r\n", b" x\r\n")
    )
    return out + end + b"\r\n" + trailer + b"\r\n"


def _damage(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    some = rng.choice((b"\r", b"\n", b"\0", b" ", b"\t", b":", b"\r\n", b"\r\n\r\n", b"\xff", b"0\r\n\r\n", bytes([rng.randrange(256)])))
    ends = [n for n in range(len(data)) if data.startswith(b"\r\n", n)]
    line = rng.choice(ends) if ends else 0
    return rng.choice((
        data[:at], data[:at] + some + data[at:], data[:at] + some + data[at + len(some) :], data[:at] + data[at + 1 :], data + data[at:],
        data[:line] + data[line + 1 :], data[:line] + some + data[line:], data[: line + 2] + rng.choice(_FIELDS) + b"\r\n" + data[line + 2 :],
    ))  # fmt: skip


def judge(data: bytes, answer: bytes) -> str | None:
    """What is wrong with an answer to these bytes; None when nothing is."""
    sent = http_reference.requests(data)
    heads = tuple(m.start[0] == b"HEAD" for m in sent.messages)
    got = _read(answer, heads) or (_read(answer, (*heads, True)) if b"HEAD" in data else None)
    if got is None:
        return "the answer is no HTTP"
    statuses = [int(m.start[0]) for m in got.messages]
    if odd := [s for s in statuses if s != 200 and s not in REFUSALS]:
        return f"answered {odd}"
    if len(statuses) > len(sent.messages) + 1:
        return f"{len(statuses)} answers to {len(sent.messages)} requests"
    if len(statuses) == len(sent.messages) + 1 and (statuses[-1] == 200 or not got.messages[-1].ends):
        return f"{statuses[-1]} to what is no request"
    if any(m.ends for m in got.messages[:-1]):
        return "an answer follows the last one"
    if len(statuses) < len(sent.messages) and not (got.messages and got.messages[-1].ends):
        return f"{len(statuses)} answers to {len(sent.messages)} requests, and no word of the end"
    return None


def _read(answer: bytes, heads: tuple[bool, ...]) -> http_reference.Reading | None:
    try:
        return http_reference.answers(answer, to_head=heads)
    except (http_reference.Bad, http_reference.Unfinished):
        return None


async def storm(router: RouterProcess, worker: FakeWorker, count: int, seed: int, *, at_once: int = 100) -> Found:
    """So many connections. Everything that the worker got is compared with what was sent."""
    rng, found, gate = random.Random(seed), Found(), asyncio.Semaphore(at_once)
    bodies: set[bytes] = set()

    async def one(data: bytes, pieces: list[bytes]) -> None:
        async with gate:
            bodies.update(m.body for m in http_reference.requests(data).messages)
            answer = await _exchange(router.data_port, pieces)
        wrong = judge(data, answer) if answer is not None else "the connection did not end"
        if wrong is not None:
            found.faults.append(f"{wrong}\n  sent {data[:1500]!r}\n  got {(answer or b'')[:600]!r}")
        found.statuses[(answer or b"")[9:12].decode("latin-1") or "closed"] += 1

    for start in range(0, count, 500):
        batch = []
        for number in range(start, min(start + 500, count)):
            data = connection(rng, number)
            cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 0, 1, 3, 20))))
            batch.append((data, [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]))
        await asyncio.gather(*(one(*b) for b in batch))
        found.faults += [f"the worker got {leg.body[:300]!r}, which nobody sent" for leg in worker.legs if _text(leg) not in bodies]
        worker.received.clear()
        bodies.clear()
    return found


def _text(leg: Received) -> bytes:
    """The client's JSON, without the token ids behind it."""
    length = leg.header(names.HEADER_JSON_LENGTH)
    return leg.body if length is None else leg.body[: int(length)]


async def _exchange(port: int, pieces: list[bytes]) -> bytes | None:
    """Sends the pieces, and reads until the router ends the connection; None when it does not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return await reader.read()
    except ConnectionError:
        return b""
    except TimeoutError:
        return None
    finally:
        writer.close()


def edge_bytes(router: RouterProcess) -> int:
    """Resident memory of the edges."""
    children = psutil.Process(router.process.pid).children(recursive=True)
    return sum(p.memory_info().rss for p in children if "fleet_router.control.control" not in p.cmdline())


async def settled(router: RouterProcess) -> list[str]:
    """What is left when all is over: sentences."""
    await router.until_idle()
    metrics = await router.metrics()
    return [f"{name} is {metrics[name]:g}" for name in ("connections", "waiting", "inflight") if metrics[name]]


async def run(folder: Path, count: int, seed: int) -> int:
    """The whole of it. Returns the exit code."""
    worker = await FakeWorker.start()
    router = await RouterProcess.start(folder, "--poll-interval", "0.5", "--static", worker.url, *FLAGS)
    try:
        await router.until_workers(1)
        pids = [p.pid for p in psutil.Process(router.process.pid).children()]
        found = await storm(router, worker, max(500, count // 5), seed)
        before = edge_bytes(router)
        more = await storm(router, worker, count - max(500, count // 5), seed + 1)
        await asyncio.sleep(3.0)
        faults = [*found.faults, *more.faults, *await settled(router)]
        grown = edge_bytes(router) - before
        if grown > MAX_GROWTH_BYTES:
            faults.append(f"the edge grew by {grown / 2**20:.1f} MiB; {MAX_GROWTH_BYTES >> 20} are allowed")
        if pids != [p.pid for p in psutil.Process(router.process.pid).children()]:
            faults.append("a process was restarted")
        if "request failed" in router.log.read_text() or "Traceback" in router.log.read_text():
            faults.append(f"the router's log has a traceback:\n{router.log.read_text()[-3000:]}")
    finally:
        await router.stop()
        await worker.stop()
    print("first answers by status:", dict(sorted((found.statuses + more.statuses).items())))
    print(f"the edge: {before / 2**20:.1f} MiB after a fifth, {grown / 2**20:+.1f} MiB at the end")
    for fault in faults[:20]:
        print("FAULT:", fault)
    print(f"fuzz-router: {len(faults)} faults" if faults else "fuzz-router: passed")
    return 1 if faults else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="make fuzz-router", description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rf-fuzz-") as folder:
        return asyncio.run(run(Path(folder), options.connections, options.seed))


if __name__ == "__main__":
    sys.exit(main())
