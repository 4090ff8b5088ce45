"""`make promises`: design rules of the router at their full size. One line for each number and its bound; exits non-zero on a miss.

    python -m fleet_testing.promises [R8] [R18] [R21] [R33]

R8  10 million random stores and removes in the index: resident memory returns to within 10 % of its start
R18 10,000 requests while no worker is ready: each gets 503 and Retry-After by its time, and memory stays where it is
R21 10,000 streams arrive as the worker wrote them (SHA-256); a slow reader costs less than 64 KiB
R33 a router that restarts has 90 % of the hit rate of one that does not within 10 s (in the replay)

Each function takes its size: `make test` runs them small. Real processes but for R33.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop

from fleet_testing.cheap_worker import CheapWorker, tokenizer_file
from fleet_testing.fake_worker import FakeWorker, Script, sse, tiny_tokenizer_zip
from fleet_testing.router_process import RouterProcess, until_async

SLOTS: Final = 8  # workers of R8
OWN_BYTES: Final = 8  # of `churn` itself, for each block
MIB: Final = 1 << 20
EDGE: Final = "fleet_router.edge.edge"
REQUEST: Final = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
QUEUE_TIMEOUT_S: Final = 2.0
LATE_S: Final = 2.0  # beyond its time: the machine is shared with the clients


@dataclass(frozen=True, slots=True)
class Number:
    """What was promised, and what came."""

    rule: str
    what: str
    value: float
    bound: float
    unit: str
    at_least: bool = False

    @property
    def is_kept(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "" if self.is_kept else "  MISS"
        return f"  {self.rule:4} {self.what:70} {self.value:12.6g} {sign} {self.bound:<10.6g} {self.unit}{verdict}"


# -- R8


def memory_of_index(changes: int, live_blocks: int, *, seed: int = 1) -> list[Number]:
    """In a process of its own, so that nobody else's memory is in the sum."""
    code = f"from fleet_testing.promises import churn; churn({changes}, {live_blocks}, {seed})"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    got = json.loads(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)
    return [
        Number("R8", f"{got['changes']:,} stores and removes, {got['most']:,} blocks at most: memory at the end", got["end"] / MIB,
               1.1 * got["start"] / MIB, "MiB"),
        Number("R8", "bytes for each block at the peak", (got["peak"] - got["start"]) / got["most"] - OWN_BYTES, 200, "bytes"),
        Number("R8", "blocks that are left", got["left"], 0, ""),
    ]  # fmt: skip


def churn(changes: int, live_blocks: int, seed: int) -> None:
    """Random stores and removes on 8 workers, then all are removed; prints what the process took. For a process of its own."""
    from fleet_router.decide.index import PrefixIndex
    from fleet_router.decide.lives import GPU
    from fleet_router.process import give_back_large_blocks

    give_back_large_blocks()  # as every child process of the router
    rng, me, slots = random.Random(seed), psutil.Process(), SLOTS
    index = PrefixIndex()
    for slot in range(slots):
        index.add_slot(slot, live_blocks * 64, by_history=False, engine_blocks=live_blocks)
    start = peak = me.memory_info().rss
    most = done = 0
    while done < changes:  # waves: up to the bound, then down to a tenth
        held = array("Q")  # engine hashes; the lowest bits say whose
        while len(held) < live_blocks and done < changes:
            key = rng.getrandbits(64)
            assert index.store(key % slots, GPU, 0, key ^ slots, key, 1 + rng.randrange(100)) == "stored"
            held.append(key ^ slots)
            done += 1
            if rng.random() < 0.3:
                _remove_one(index, GPU, held, rng)
                done += 1
        most = max(most, len(held))
        peak = max(peak, me.memory_info().rss)
        while held:
            _remove_one(index, GPU, held, rng)
            done += 1
    index.check_integrity()
    left = len(index)
    while index.sweep():
        pass
    del held
    gc.collect()
    print(json.dumps({"start": start, "peak": peak, "end": me.memory_info().rss, "most": most, "changes": done, "left": left}))


def _remove_one(index: Any, tier: int, held: array[int], rng: random.Random) -> None:
    at = rng.randrange(len(held))
    held[at], held[-1] = held[-1], held[at]
    engine_hash = held.pop()
    assert index.remove(engine_hash % SLOTS, tier, 0, engine_hash)


# -- clients


class Client:
    """One connection; reads whole answers."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()

    async def ask(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, header lines, body: with a length or in chunks."""
        self.writer.write(REQUEST % (path.encode(), len(body), body))
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        if "Content-Length" in fields:
            return int(head.split()[1]), fields, await self.reader.readexactly(int(fields["Content-Length"]))
        pieces = []
        while size := int(await self.reader.readline(), 16):
            pieces.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return int(head.split()[1]), fields, b"".join(pieces)


def rss_of(router: RouterProcess) -> int:
    edge = router.child(EDGE)
    assert edge is not None
    return int(edge.memory_info().rss)


# -- R18


async def no_workers(folder: Path, requests: int, *, at_once: int) -> list[Number]:
    """As many requests twice: what the second time takes more is what the first did not warm up."""
    worker = CheapWorker(folder, tokenizer_file(folder, tiny_tokenizer_zip())).start()
    await asyncio.to_thread(worker.wait)
    router = await RouterProcess.start(folder, "--static", worker.url, "--queue-timeout", str(QUEUE_TIMEOUT_S), "--poll-interval", "0.2")
    try:
        await router.until_workers(1)
        worker.end()
        await router.until_workers(0)
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello " * 200}]}).encode()
        ends: Counter[str] = Counter()
        slowest = 0.0

        async def ask(count: int) -> None:
            nonlocal slowest
            async with Client(router.data_port) as client:
                for _ in range(count):
                    began = time.monotonic()
                    status, fields, said = await client.ask("/v1/chat/completions", body)
                    slowest = max(slowest, time.monotonic() - began)
                    right = status == 503 and int(fields.get("Retry-After", 0)) > 0
                    ends[json.loads(said)["error"]["code"] if right else f"{status} without Retry-After"] += 1

        for _ in range(2):
            await asyncio.gather(*(ask(requests // at_once) for _ in range(at_once)))
        before = rss_of(router)
        await asyncio.gather(*(ask(requests // at_once) for _ in range(at_once)))
        grown = rss_of(router) - before
        metrics = await router.metrics()
        total = 3 * (requests // at_once) * at_once
        return [
            Number("R18", f"{total:,} requests, {at_once:,} at once, answered with 503 and Retry-After", ends["no_ready_worker"] + ends["queue_full"],
                   total, "", at_least=True),
            Number("R18", "of them after their whole time in the queue", ends["no_ready_worker"], at_once // 4, "", at_least=True),
            Number("R18", "slowest answer", slowest, QUEUE_TIMEOUT_S + LATE_S, "s"),
            Number("R18", "growth of the edge in the last third", grown / MIB, 5, "MiB"),
            Number("R18", "waiting and in flight at the end", metrics["waiting"] + metrics["inflight"], 0, ""),
        ]  # fmt: skip
    finally:
        await router.stop()
        worker.end()


# -- R21


def random_stream(rng: random.Random, n: int) -> tuple[bytes, list[bytes]]:
    """A stream, and the pieces in which it is written: split anywhere."""
    events = [sse({"n": n, "t": rng.choice(("é😀中", "word ", "\\", "x" * rng.randrange(1, 3000)))}, done=False) for _ in range(rng.randrange(1, 12))]
    text = b": hello\r\n\r\n" + b"".join(events).replace(b"\n\n", rng.choice((b"\n\n", b"\r\n\r\n"))) + b"data: [DONE]\n\n"
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    return text, [p for p in (text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)) if p]


async def digests(folder: Path, streams: int, *, seed: int = 4) -> list[Number]:
    """Streams of random text in random pieces, one after the other on several workers at a time."""
    rng, lanes = random.Random(seed), 4
    workers = [await FakeWorker.start(service=f"m{n}", served=(f"m{n}",)) for n in range(lanes)]
    router = await RouterProcess.start(folder, "--static", ",".join(w.url for w in workers))
    same = 0
    try:
        await router.until_workers(lanes)

        async def lane(n: int) -> None:
            nonlocal same
            body = json.dumps({"model": f"m{n}", "messages": [], "stream": True}).encode()
            async with Client(router.data_port) as client:
                for k in range(streams // lanes):
                    text, pieces = random_stream(rng, k)
                    workers[n].scripts.append(Script(pieces=pieces))
                    _, _, got = await client.ask("/v1/chat/completions", body)
                    same += hashlib.sha256(got).digest() == hashlib.sha256(text).digest()
                    workers[n].received.clear()

        await asyncio.gather(*map(lane, range(lanes)))
    finally:
        await router.stop()
        for worker in workers:
            await worker.stop()
    return [Number("R21", f"of {streams // lanes * lanes:,} streams arrived as they were written", same, streams // lanes * lanes, "", at_least=True)]


async def slow_readers(folder: Path, streams: int) -> list[Number]:
    """Clients that ask for a long stream and read nothing; the edge grows by what it holds for them."""
    worker = CheapWorker(folder, tokenizer_file(folder, tiny_tokenizer_zip()), long=200_000).start()
    await asyncio.to_thread(worker.wait)
    router = await RouterProcess.start(folder, "--static", worker.url, "--write-timeout", "600")
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello " * 1_000}], "stream": True}).encode()
    request = REQUEST % (b"/v1/chat/completions", len(body), body)
    clients: list[socket.socket] = []

    async def open_some(count: int) -> int:
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel keeps little
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", router.data_port))
            await asyncio.get_running_loop().sock_sendall(client, request)
            clients.append(client)
        last = -1

        async def all_run() -> bool:
            return (await router.metrics()).get("inflight") == len(clients)

        async def settled() -> bool:  # what comes from the worker has stopped
            nonlocal last
            await asyncio.sleep(1.0)
            now, last_one = rss_of(router), last
            last = now
            return abs(now - last_one) < 64 << 10

        await until_async(all_run, "all streams run", 120)
        await until_async(settled, "the edge grows no more", 120)
        return rss_of(router)

    try:
        await router.until_workers(1)
        before = await open_some(20)  # what the first ones cost once
        after = await open_some(streams)
    finally:
        for client in clients:
            client.close()
        await router.stop()
        worker.end()
    return [
        Number("R21", f"memory of each of {streams:,} streams whose client does not read", (after - before) / streams / 1024, 64, "KiB"),
    ]


# -- R33


def restart(sessions: int, seconds: float) -> list[Number]:
    """Hit rates of what comes from 10 s after the restart on, against the same log without one."""
    from fleet_router.replay.restart import Restart
    from fleet_router.replay.simulate import Machine, Options, Simulation
    from fleet_router.replay.trace import built_in

    requests, at = built_in(sessions=sessions, seconds=seconds), seconds / 2
    shares = []
    for when in (None, Restart(at)):
        simulation = Simulation(requests, Machine(), "ours", options=Options(restart=when))
        simulation.run()
        jobs = [j for j in simulation.jobs if at + 10 <= j.arrived < at + 40]
        shares.append(sum(j.hit_tokens for j in jobs) / sum(j.request.input_tokens for j in jobs))
    return [Number("R33", f"hit rate from 10 s after a restart on, of {shares[0]:.0%} without one", shares[1] / shares[0], 0.9, "", at_least=True)]


# -- all


async def in_folder(run: Callable[..., Any], *args: Any, **options: Any) -> list[Number]:
    with tempfile.TemporaryDirectory(prefix="rf-promises-") as folder:
        return await run(Path(folder), *args, **options)  # type: ignore[no-any-return]


FULL: Final[dict[str, Callable[[], list[Number]]]] = {
    "R8": lambda: memory_of_index(10_000_000, 400_000),
    "R18": lambda: uvloop.run(in_folder(no_workers, 10_000, at_once=2_000)),
    "R21": lambda: [*uvloop.run(in_folder(digests, 10_000)), *uvloop.run(in_folder(slow_readers, 500))],
    "R33": lambda: restart(1_000, 400.0),
}


def main(argv: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="make promises", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", choices=[[], *FULL], help="default: all")
    missed = 0
    for rule in parser.parse_args(argv).rules or FULL:
        began = time.monotonic()
        numbers = FULL[rule]()
        print("\n".join(map(str, numbers)), f"\n  {rule:4} took {time.monotonic() - began:.0f} s", flush=True)
        missed += sum(not n.is_kept for n in numbers)
    print("promises:", f"FAILED ({missed})" if missed else "kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
