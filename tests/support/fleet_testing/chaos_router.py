"""`make chaos-router`: clients and workers are killed at random under load; at the end nothing may be left and no request without an end.

    python -m fleet_testing.chaos_router [--seconds S] [--rate N] [--seed S] [--kill-every S] [--workers N] [--kill-router-every S]

A real router in front of real processes: plain workers and pairs of prefill and decode. Requests come at a fixed rate whatever becomes of
them, unless so many are open that the machine cannot carry that rate: then they wait, and less than 80 % of it is a miss. Some clients leave
in the middle. Workers get SIGKILL and come back on the same port, or are stopped for a while. With
--kill-router-every the router's own processes get the same: its edges, its brain, its control process; what is stopped there stays so until
the router itself notices. Only a request that an edge had when it was killed may end without an answer. Prints one table and exits non-zero
on a miss. `chaos` is the part that `make test` runs for a few seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httptools
import httpx
import psutil
import uvloop

from fleet_testing.cheap_worker import CheapWorker, tokenizer_file, told
from fleet_testing.fake_worker import tiny_tokenizer_zip
from fleet_testing.router_process import RouterProcess, until_async

EDGE, BRAIN, CONTROL = "fleet_router.edge.edge", "fleet_router.brain.process", "fleet_router.control.control"
ROLES: Final = ("unified", "unified", "prefill", "prefill", "decode", "decode")
CHANCES: Final = {"errors": 0.01, "busy": 0.01, "cuts": 0.01, "seconds": 0.08}
FLAGS: Final = (
    "--first-token-timeout",
    "4",
    "--silence-timeout",
    "4",
    "--queue-timeout",
    "2",
    "--busy-timeout",
    "4",
    "--poll-interval",
    "0.5",
    "--hang-timeout",
    "3",
)
LEAVERS: Final = 0.15
MAX_OPEN: Final = 1_000  # requests at once: a stall of 2 s at 500 a second; at 50 a second all of them end within ANSWER_LIMIT_S
MIN_RATE: Final = 0.8  # of the rate that was asked for
STREAMS: Final = 0.5
ANSWER_LIMIT_S: Final = 30.0  # longer than all the router's limits together
MAX_GROWTH_BYTES: Final = 10 << 20
LOST: Final = "lost with its edge"
ENDS: Final = ("200", "200 cut", "500", "502", "503", "504")  # how a request may end in this world


@dataclass(slots=True)
class Chaos:
    """What was sent, how it ended, and what is held afterwards."""

    sent: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    killed: int = 0
    stopped: int = 0
    slowest_s: float = 0.0
    slowest_connect_s: float = 0.0
    left: dict[str, float] = field(default_factory=dict)
    warm_bytes: int = 0
    end_bytes: int = 0
    router_kills: Counter[str] = field(default_factory=Counter)  # by process and signal
    edge_deaths: list[tuple[float, float]] = field(default_factory=list)  # from the signal until the next one serves
    restarts: int = 0  # that the router's log tells
    seconds: float = 0.0
    rate: float = 0.0

    def had_no_edge(self, began: float) -> bool:
        """A request that began then (monotonic time) and ends now may have been with an edge that was killed."""
        return any(began <= end for _, end in self.edge_deaths)

    def misses(self, *, memory: bool) -> list[str]:
        """Sentences, one a fault. memory: also judge the edge's growth (needs a warm-up of minutes)."""
        out = list(self.unexpected[:10])
        out += [f"{name} is {value:g} at the end" for name, value in self.left.items() if value]
        lost = self.sent - sum(self.ended.values())
        if lost:
            out.append(f"{lost} requests have no end")
        if self.sent < MIN_RATE * self.rate * self.seconds:
            out.append(f"{self.sent / self.seconds:.0f} requests/s were sent, not {self.rate:g}: {MAX_OPEN} were open at once. Is the machine busy?")
        if not self.ended["200"] or self.ended["200"] < 0.5 * self.sent:
            out.append(f"only {self.ended['200']} of {self.sent} requests were served: this shows nothing")
        if self.restarts != sum(self.router_kills.values()):
            out.append(f"{self.restarts} processes of the router were restarted, {sum(self.router_kills.values())} were killed")
        if memory and self.end_bytes - self.warm_bytes > MAX_GROWTH_BYTES:
            out.append(f"the edge grew by {(self.end_bytes - self.warm_bytes) / 2**20:.1f} MiB; {MAX_GROWTH_BYTES >> 20} are allowed")
        return out

    def table(self) -> str:
        """For the terminal."""
        lines = [f"  sent {self.sent} in {self.seconds:.0f} s ({self.sent / max(1e-9, self.seconds):.0f} requests/s)"]
        lines += [f"  {kind:24} {count:8d}" for kind, count in sorted(self.ended.items())]
        lines.append(f"  {'workers killed, stopped':24} {self.killed:8d} {self.stopped}")
        lines += [f"  {kind:24} {count:8d}" for kind, count in sorted(self.router_kills.items())]
        lines.append(f"  {'slowest end':24} {self.slowest_s:8.2f} s; to connect {self.slowest_connect_s:.2f} s")
        lines.append(f"  {'edge resident':24} {self.warm_bytes / 2**20:8.1f} MiB warm, {self.end_bytes / 2**20:.1f} MiB at the end")
        return "\n".join(lines + [f"  left: {name:24} {value:g}" for name, value in self.left.items()])


class Client(asyncio.Protocol):
    """One connection of a client; carries one request at a time and goes back to the idle ones."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[str] | None = None
        self._status = 0
        self._stream_ended = False
        self._stream = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def ask(self, data: bytes) -> asyncio.Future[str]:
        """Sends one request; the future says how it ended."""
        assert self.transport is not None
        self.done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._stream_ended = self._stream = False
        self._status = 0
        self.transport.write(data)
        return self.done

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._end(f"no HTTP: {e}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._end(f"{self._status} cut" if self._status and self._stream else "closed without an answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type" and value.startswith(b"text/event-stream"):
            self._stream = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._stream_ended = data.endswith(b"[DONE]\n\n")

    def on_message_complete(self) -> None:
        self._end(f"{self._status}" if self._stream_ended or not self._stream else f"{self._status} complete without its end")

    def _end(self, how: str) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(how)


class Load:
    """Requests at a fixed rate from clients of which some leave."""

    def __init__(self, port: int, chaos: Chaos, rng: random.Random) -> None:
        self._port = port
        self._chaos = chaos
        self._rng = rng
        self._idle: list[Client] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._bodies = [self._request(stream) for stream in (False, True) for _ in range(50)]

    def _request(self, stream: bool) -> bytes:
        words = f"{self._rng.randrange(20)} shared words of a prompt that others have too. " * self._rng.randrange(1, 30)
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": 8, "stream": stream}).encode()
        return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def run(self, seconds: float, rate: float) -> None:
        """Open loop, up to MAX_OPEN; returns when all that was sent has ended."""
        loop = asyncio.get_running_loop()
        begin, number = loop.time(), 0
        while (now := loop.time() - begin) < seconds:
            while number < now * rate:
                number += 1
                if len(self._tasks) >= MAX_OPEN:
                    continue  # not sent later either: that would be a burst
                self._chaos.sent += 1
                task = loop.create_task(self._one())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0.004)
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=ANSWER_LIMIT_S + 5)
        for client in self._idle:
            if client.transport is not None:
                client.transport.close()

    async def _one(self) -> None:
        loop, rng, chaos = asyncio.get_running_loop(), self._rng, self._chaos
        began = loop.time()
        client = self._take()
        is_new = client is None
        if client is None:
            try:
                _, client = await loop.create_connection(Client, "127.0.0.1", self._port)
            except OSError as e:
                if chaos.had_no_edge(time.monotonic() - (loop.time() - began)):  # it was given to the one that was killed
                    chaos.ended[LOST] += 1
                    return
                chaos.ended["no connection"] += 1
                chaos.unexpected.append(f"a client could not connect: {e}")
                return
            chaos.slowest_connect_s = max(chaos.slowest_connect_s, loop.time() - began)
            began = loop.time()
        stream = rng.random() < STREAMS
        data = self._bodies[rng.randrange(50) + (50 if stream else 0)]
        if rng.random() < LEAVERS:
            client.ask(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
            await asyncio.sleep(rng.random() * 0.1)
            if client.transport is not None:
                client.transport.abort()
            chaos.ended["left"] += 1
            return
        done = client.ask(data)
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                how = await done
        except TimeoutError:
            how = f"no end within {ANSWER_LIMIT_S:g} s"
        if how == "closed without an answer" and not is_new:
            how = "kept connection closed"  # the router ends idle ones: a client's own race
        if how == "closed without an answer" and chaos.had_no_edge(time.monotonic() - (loop.time() - began)):
            how = LOST
        chaos.ended[how] += 1
        chaos.slowest_s = max(chaos.slowest_s, loop.time() - began)
        if how not in (*ENDS, LOST, "kept connection closed"):
            chaos.unexpected.append(f"a request ended with {how!r}")
        if client.transport is not None:
            if how.isdigit():
                self._idle.append(client)
            else:
                client.transport.abort()  # what it would still get belongs to nobody

    def _take(self) -> Client | None:
        while self._idle:
            client = self._idle.pop()
            if client.transport is not None and not client.transport.is_closing():
                return client
        return None


async def misfortune(workers: list[CheapWorker], chaos: Chaos, rng: random.Random, every_s: float, stop: asyncio.Event) -> None:
    """Kills and stops workers, and lets them come back, until it is told to stop; then all of them live."""
    away: list[tuple[float, CheapWorker]] = []
    while not stop.is_set():
        await asyncio.sleep(every_s * (0.5 + rng.random()))
        await asyncio.to_thread(_come_back, away, time.monotonic())
        living = [w for w in workers if w.lives]
        if len(living) < 4:
            continue
        worker = rng.choice(living)
        if rng.random() < 0.75:
            await asyncio.to_thread(worker.send, signal.SIGKILL)
            chaos.killed += 1
        else:
            worker.send(signal.SIGSTOP)
            chaos.stopped += 1
        away.append((time.monotonic() + rng.random() * 3 * every_s, worker))
    await asyncio.to_thread(_come_back, away, float("inf"))


def _come_back(away: list[tuple[float, CheapWorker]], now: float) -> None:
    for entry in [e for e in away if e[0] <= now]:
        away.remove(entry)
        if entry[1].process is None:
            entry[1].start().wait()
        else:
            entry[1].send(signal.SIGCONT)


async def router_misfortune(router: RouterProcess, chaos: Chaos, rng: random.Random, every_s: float, edges: int, stop: asyncio.Event) -> None:
    """Kills and stops the router's own processes, one at a time, until it is told to stop. What is stopped nobody lets go on but the router."""
    turns: list[str] = []  # each has its turn
    while not stop.is_set():
        await asyncio.sleep(every_s * (0.5 + rng.random()))
        if not turns:
            turns = rng.sample(parts := [EDGE, EDGE, *([BRAIN] if edges > 1 else []), CONTROL], len(parts))
        module = turns.pop()
        victim = rng.choice(await asyncio.to_thread(router.children, module))
        number = signal.SIGKILL if rng.random() < 0.7 else signal.SIGSTOP
        began = time.monotonic()
        if module == EDGE:
            chaos.edge_deaths.append((began, float("inf")))
        victim.send_signal(number)
        chaos.router_kills[f"{module.split('.')[1]} {number.name}"] += 1
        await asyncio.to_thread(psutil.wait_procs, [victim], 20)

        async def whole() -> bool:
            return await router.is_ready() and (edges == 1 or (await router.metrics()).get("edges") == edges)

        await until_async(whole, f"the router is whole again after {number.name} of {module}")
        if module == EDGE:
            chaos.edge_deaths[-1] = (began, time.monotonic())


async def chaos(
    folder: Path, seconds: float, rate: float, *, seed: int = 0, kill_every_s: float = 2.0, edges: int = 1, kill_router_every_s: float = 0.0
) -> Chaos:
    """The whole of it. Args: edges: processes of the router that speak HTTP. kill_router_every_s: 0: they are let alone."""
    out, rng = Chaos(seconds=seconds, rate=rate), random.Random(seed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)  # a stall is no end of files
    tokenizer = tokenizer_file(folder, tiny_tokenizer_zip())
    workers = [CheapWorker(folder, tokenizer, role=role, **CHANCES).start() for role in ROLES]
    router: RouterProcess | None = None
    try:
        for worker in workers:
            await asyncio.to_thread(worker.wait)
        router = await RouterProcess.start(folder, "--workers", str(edges), "--static", ",".join(w.url for w in workers), *FLAGS)
        await router.until_workers(len(workers))
        serving = [*router.children(EDGE), *router.children(BRAIN)]
        stop = asyncio.Event()
        bad_luck = [asyncio.create_task(misfortune(workers, out, rng, kill_every_s, stop))]
        if kill_router_every_s:
            bad_luck.append(asyncio.create_task(router_misfortune(router, out, rng, kill_router_every_s, edges, stop)))
        load = Load(router.data_port, out, rng)
        await load.run(seconds * 0.25, rate)
        if not kill_router_every_s:
            out.warm_bytes = sum(p.memory_info().rss for p in serving)
        await load.run(seconds * 0.75, rate)
        stop.set()
        await asyncio.gather(*bad_luck)
        await _settle(router, workers, out)
        if not kill_router_every_s:
            out.end_bytes = sum(p.memory_info().rss for p in serving if p.is_running())
        out.restarts = router.log.read_text().count("it is restarted")
        if "Traceback" in router.log.read_text():
            out.unexpected.append(f"the router's log has a traceback: {router.log.read_text().partition('Traceback')[2][:1500]}")
    finally:
        if router is not None:
            await router.stop()
        for worker in workers:
            worker.end()
    return out


async def _settle(router: RouterProcess, workers: list[CheapWorker], out: Chaos) -> None:
    """Waits until nothing runs, at most for the router's own limits, and notes what is held all the same."""

    async def quiet() -> bool:
        metrics = await router.metrics()
        return not any(metrics.get(n) for n in ("inflight", "waiting", "connections"))

    try:
        await until_async(quiet, "nothing is in flight", 20)
        await router.until_workers(len(workers))
    except AssertionError as e:
        out.unexpected.append(str(e))
    metrics = await router.metrics()
    out.left = {name: metrics.get(name, -1.0) for name in ("inflight", "waiting", "connections")}
    listed = (await router.get("/workers"))["workers"]
    for name in ("inflight", "pend", "run", "ctx"):
        out.left[f"workers' {name}"] = sum(w[name] for w in listed)
    out.left["workers listed too many"] = len(listed) - len(workers)
    with httpx.Client(timeout=5) as client:
        out.left["running at workers"] = sum(s["running"] for s in told(workers, lambda url: client.get(url).content))


def main(argv: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="make chaos-router", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second")
    parser.add_argument("--kill-every", type=float, default=2.0, help="seconds between two misfortunes of workers")
    parser.add_argument("--workers", type=int, default=1, help="processes of the router that speak HTTP")
    parser.add_argument("--kill-router-every", type=float, default=0.0, help="seconds between two misfortunes of the router's own processes; 0: none")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args(argv)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rf-chaos-") as folder:
        run = chaos(
            Path(folder), options.seconds, options.rate, seed=options.seed, kill_every_s=options.kill_every,
            edges=options.workers, kill_router_every_s=options.kill_router_every,
        )  # fmt: skip
        out = uvloop.run(run)
    print(out.table())
    misses = out.misses(memory=options.seconds >= 60)
    for miss in misses:
        print(f"MISS: {miss}")
    print("chaos-router:", "FAILED" if misses else "passed")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
