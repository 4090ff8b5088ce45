"""Rules of the design that only a whole router can show: bounds, choices under load, discovery, drains. Numbers: tests/router/rules.txt."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_router.brain.registry import Registry
from fleet_router.control.discovery import PODS, SERVICES, Discovery, Json
from fleet_router.decide.retry import BUDGET_FLOOR
from fleet_router.desk import Want
from fleet_router.http.client import Pool, Sink
from fleet_testing import chaos_router, promises
from fleet_testing.fake_worker import DEFAULT_STREAM, FakeWorker, Script, error_body, sse
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until

BODY = json.dumps({"model": "tiny", "prompt": "x"}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


@pytest.mark.rule("R12")
async def test_200_requests_of_one_turn_of_the_loop_are_spread_over_8_workers(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(*[await make_worker(prefill_tokens_per_s=12_000.0, capacity=3_000_000) for _ in range(8)])
    leases = []
    for n in range(200):  # nothing is awaited between two of them
        want = Want(("demo", "tiny"), 1024, 100, "aaaaaaaa", tuple(range(1000 * n, 1000 * n + 16)))
        lease = fleet.brain.pick(want)
        assert lease is not None
        leases.append(lease)
    counts = Counter(lease.serving.worker.name for lease in leases)
    assert len(counts) == 8 and max(counts.values()) <= 1.5 * 200 / 8, counts
    for lease in leases:
        lease.release()
    await fleet.idle()


@pytest.mark.rule("R18")
async def test_thousands_of_requests_without_a_worker_are_all_answered_in_time(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, queue_timeout=0.05, max_queue=50)
    worker.ready = False
    await until(lambda: fleet.ready() == 0, "no worker is ready")
    codes: Counter[str] = Counter()

    async def ask(count: int) -> None:
        reader, writer = await fleet.connect()
        for _ in range(count):
            writer.write(POST)
            head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
            fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
            error = json.loads(await reader.readexactly(int(fields["Content-Length"])))["error"]
            assert head.startswith("HTTP/1.1 503") and int(fields["Retry-After"]) > 0
            codes[error["code"]] += 1
        writer.close()

    await asyncio.gather(*(ask(10) for _ in range(100)))
    before = psutil.Process().memory_info().rss
    await asyncio.gather(*(ask(15) for _ in range(100)))
    assert sum(codes.values()) == 2_500 and set(codes) == {"no_ready_worker", "queue_full"}
    assert psutil.Process().memory_info().rss - before < 20 << 20
    assert fleet.brain.waiting == {}


@pytest.mark.rule("R21")
@pytest.mark.case("C44")
async def test_the_digests_of_many_streams_of_any_shape_are_the_worker_s(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """Red with `data.strip()` in `Attempt._forward`; for usage, with only the last piece looked at in `Attempt._learn_from_stream`."""
    worker = await make_worker()
    fleet = await make_fleet(worker)
    rng = random.Random(4)

    async def one(n: int) -> None:
        events = [
            sse({"n": n, "t": rng.choice(("é😀中", "word ", "\\", "x" * rng.randrange(1, 3000)))}, done=False) for _ in range(rng.randrange(1, 12))
        ]
        text = b": hello\r\n\r\n" + b"".join(events).replace(b"\n\n", rng.choice((b"\n\n", b"\r\n\r\n"))) + b"data: [DONE]\n\n"
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
        worker.scripts.append(Script(pieces=[p for p in (text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)) if p]))
        got = (await fleet.chat(stream=True)).content
        assert hashlib.sha256(got).digest() == hashlib.sha256(text).digest()

    for n in range(150):
        await one(n)
    await fleet.idle()


@pytest.mark.rule("R23")
async def test_workers_that_close_idle_connections_at_random_cost_no_request(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker() for _ in range(3)]
    fleet = await make_fleet(*workers)
    rng = random.Random(3)
    stop = asyncio.Event()

    async def close_some() -> None:
        while not stop.is_set():
            await asyncio.sleep(rng.random() * 0.01)
            for worker in workers:
                worker.idle_close = rng.random() < 0.5  # when the next request comes on it, as a server whose time is just over

    closing = asyncio.create_task(close_some())
    got: Counter[int] = Counter()
    for n in range(40):
        answers = await asyncio.gather(*(fleet.chat(f"{n} {k}", stream=k % 2 == 0) for k in range(5)))
        got.update(a.status_code for a in answers)
    stop.set()
    await closing
    assert got == {200: 200} and sum(len(w.legs) for w in workers) == 200
    assert sum(w.connections for w in workers) > 20, "connections were closed"
    assert fleet.ready() == 3
    await fleet.idle()


@pytest.mark.rule("R23")
async def test_a_connection_that_is_reset_at_once_is_no_request_without_an_end() -> None:
    """As by a worker that is killed between its accept and our turn."""
    loop, pool, lost = asyncio.get_running_loop(), Pool(), []

    class Lost(Sink):
        def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...

        def on_body(self, data: bytes) -> None: ...

        def on_end(self) -> None: ...

        def on_lost(self, error: ApiError) -> None:
            lost.append(error.code)

    async def connect(factory: Any, *address: Any) -> Any:
        protocol = factory()
        protocol.connection_made(asyncio.Transport())
        protocol.connection_lost(ConnectionResetError())
        return None, protocol

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loop), "create_connection", lambda self, *args: connect(*args))
        pool.start("127.0.0.1", 1, (b"x",), Lost())
        await until(lambda: bool(lost), "the request has an end", 2)
    assert lost == ["worker_unreachable"] and not pool._open


@pytest.mark.rule("R24")
@pytest.mark.parametrize("bad", [Script(status=502, body=b"x"), Script(body=b"{}" * 50, truncate=True)], ids=["502", "half"])
async def test_engines_start_at_most_a_tenth_more_requests_than_there_are(bad: Script, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker() for _ in range(3)]
    fleet = await make_fleet(*workers)
    rng = random.Random(2)
    for worker in workers:
        worker.scripts.extend(bad if rng.random() < 0.4 else Script() for _ in range(2000))
    for _ in range(15):
        await asyncio.gather(*(fleet.chat(f"{n}") for n in range(10)))
    legs = [leg for w in workers for leg in w.legs]
    assert len(legs) <= 150 * 1.1 + 2 * BUDGET_FLOOR
    tries = Counter(leg.header("x-request-id") for leg in legs)
    assert max(tries.values()) <= 2
    for request_id, count in tries.items():
        assert sum(any(leg.header("x-request-id") == request_id for leg in w.legs) for w in workers) == count, "twice to one worker"
    await fleet.idle()


@pytest.mark.rule("R27")
@pytest.mark.parametrize("broken", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["refuses", "closes", "is gone"])
async def test_when_one_leg_fails_the_other_ends_within_a_second(broken: str, how: str, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    legs = {"prefill": await make_worker("prefill"), "decode": await make_worker("decode")}
    fleet = await make_fleet(*legs.values(), first_token_timeout=30.0)
    bad, other = legs[broken], legs["decode" if broken == "prefill" else "prefill"]
    both = asyncio.Event()
    other.default = Script(wait=asyncio.Event())
    bad.default = (
        Script(wait=both, status=500, body=error_body("kv_lost", "the first cause")) if how != "closes" else Script(wait=both, close_before=True)
    )
    task = asyncio.create_task(fleet.chat(stream=True))
    await until(lambda: bool(bad.legs and other.legs), "both have it")
    began = time.monotonic()
    if how == "is gone":
        bad.cut_connections()
    both.set()
    answer = await task
    took = time.monotonic() - began
    assert answer.status_code in (500, 502) and answer.json()["error"]["code"] in ("kv_lost", "worker_lost")
    await until(lambda: len(other.aborts) >= 1 and other.legs[0].gone.is_set(), "the other is told", 5)
    assert took < 1.0
    await fleet.idle()


@pytest.mark.rule("R35")
async def test_no_worker_ever_holds_more_than_theta_and_one_request(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker() for _ in range(4)]  # 1,000 tokens/s
    fleet = await make_fleet(*workers, max_queue=5000)
    for worker in workers:
        worker.default = Script(delay_s=0.02, pieces=[DEFAULT_STREAM])
    long = "many words of a prompt " * 30  # about 700 tokens
    tasks = [asyncio.create_task(fleet.chat(f"{n} {long}", stream=True)) for n in range(60)]
    most = 0.0
    while not all(t.done() for t in tasks):
        most = max(most, *((w["pend"] - 800) / w["prefillTokensPerS"] for w in fleet.told()))
        await asyncio.sleep(0.002)
    assert {t.result().status_code for t in tasks} == {200}
    assert -0.5 < most <= 1.5  # theta of a second, by a speed that is learned meanwhile
    await fleet.idle()


@pytest.mark.rule("R39")
async def test_a_thousand_explanations_change_nothing(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker("prefill"), await make_worker("prefill"), await make_worker("decode"))
    await fleet.chat("a prompt that one of them knows " * 20)
    await fleet.idle()
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a prompt that one of them knows " * 20}]}).encode()

    def state() -> Any:
        return (fleet.told(), len(fleet.brain.decisions), fleet.edge.counters.snapshot({}), len(fleet.brain.index), fleet.brain._leases)

    before = state()
    for _ in range(1000):
        await fleet.edge.service.explain(body)
    assert state() == before
    fleet.brain.deciding.check_integrity()


# -- discovery


class LossyApi:
    """An API server whose watch loses each event with a chance."""

    def __init__(self, loss: float) -> None:
        self.loss = loss
        self.objects: dict[str, dict[str, Json]] = {SERVICES: {}, PODS: {}}
        self._events: dict[str, asyncio.Queue[tuple[str, Json]]] = {SERVICES: asyncio.Queue(), PODS: asyncio.Queue()}
        self._rng = random.Random(1)

    def set(self, kind: str, o: Json) -> None:
        self.objects[kind][o["metadata"]["name"]] = o
        if self._rng.random() >= self.loss:
            self._events[kind].put_nowait(("MODIFIED", o))

    async def connect(self) -> LossyApi:
        return self

    async def list(self, kind: str) -> tuple[list[Json], str]:
        return list(self.objects[kind].values()), "1"

    async def watch(self, kind: str, resource_version: str) -> AsyncIterator[tuple[str, Json]]:
        while True:
            yield await self._events[kind].get()

    async def close(self) -> None:
        pass


def pod(worker: FakeWorker, name: str, **meta: str) -> Json:
    labels = {
        names.LABEL_COMPONENT: names.COMPONENT_WORKER, names.LABEL_SERVICE: "tiny", names.LABEL_ROLE: "unified", names.LABEL_REVISION: "aaaaaaaa",
    }  # fmt: skip
    status = {"podIP": "127.0.0.1", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "namespace": "demo", "uid": worker.record.pod_uid, "labels": labels, **meta}, "status": status}


@pytest.fixture
async def watched(make_fleet: MakeFleet, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Three pods behind an API server; each pod's internal port is its worker's."""
    workers = [await make_worker() for _ in range(3)]
    ports = {w.record.pod_uid: w.port for w in workers}
    add = Registry._add

    def add_with_port(self: Registry, endpoint: Any) -> None:
        endpoint.port = ports[endpoint.key]
        add(self, endpoint)

    monkeypatch.setattr(Registry, "_add", add_with_port)
    tasks: list[asyncio.Task[None]] = []

    async def start(loss: float, relist_s: float) -> tuple[LossyApi, Fleet, list[FakeWorker]]:
        api = LossyApi(loss)
        api.set(SERVICES, {"metadata": {"name": "tiny", "namespace": "demo", "uid": "s"}, "spec": {"model": {"name": "tiny"}}})
        for n, worker in enumerate(workers):
            api.set(PODS, pod(worker, f"p{n}"))
        fleet: Fleet = await make_fleet(wait=False, static=(), kubernetes=True)
        tasks.append(asyncio.create_task(Discovery(api.connect, fleet.edge.take_observed, relist_s).run()))
        return api, fleet, workers

    yield start
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.rule("R17")
@pytest.mark.parametrize("loss", [0.0, 1.0], ids=["watch", "all events lost"])
async def test_a_pod_that_goes_gets_no_pick_once_that_is_seen(loss: float, watched: Any) -> None:
    api, fleet, workers = await watched(loss, 0.3)
    await until(lambda: fleet.ready() == 3, "all are ready")
    await fleet.until_tokenizers([workers[0].record.model_revision])
    api.set(PODS, pod(workers[0], "p0", deletionTimestamp="2026-01-01T00:00:00Z"))
    await until(lambda: fleet.ready() == 2, "it is seen, at the latest by the next list", 5)
    before = len(workers[0].legs)
    for n in range(20):
        assert (await fleet.chat(f"{n}")).status_code == 200
    assert len(workers[0].legs) == before and len(workers[1].legs) + len(workers[2].legs) >= 20


@pytest.mark.rule("R17")
async def test_a_worker_whose_record_comes_late_becomes_routable(watched: Any) -> None:
    api, fleet, workers = await watched(0.0, 60.0)
    late = workers[2]
    simple = late._simple
    late._simple = lambda request: (503, b"{}", "application/json") if request.path == "/worker" else simple(request)  # type: ignore[method-assign]
    late.cut_connections()
    late.restart()
    await until(lambda: fleet.ready() >= 2, "the others are ready")
    late._simple = simple  # type: ignore[method-assign]
    await until(lambda: fleet.ready() == 3, "it is routable, nothing was restarted")
    assert api.objects[PODS]


@pytest.mark.rule("R16")
@pytest.mark.processes
def test_killed_clients_and_workers_leave_nothing(tmp_path: Path) -> None:
    """The small form of `make chaos-router`."""
    out = asyncio.run(chaos_router.chaos(tmp_path, 4.0, 100, seed=3, kill_every_s=0.6))
    assert out.misses(memory=False) == [], out.table()
    assert out.killed + out.stopped >= 2


@pytest.mark.rule("R16")
@pytest.mark.rule("R30")
@pytest.mark.processes
def test_killed_and_stopped_processes_of_the_router_leave_nothing(tmp_path: Path) -> None:
    """The small form of `make chaos-router ARGS='--workers 2 --kill-router-every 5'`."""
    out = asyncio.run(chaos_router.chaos(tmp_path, 8.0, 60, seed=5, kill_every_s=1.0, edges=2, kill_router_every_s=1.0))
    assert out.misses(memory=False) == [], out.table()
    assert sum(out.router_kills.values()) >= 2


def test_the_table_of_the_chaos_sees_what_is_lost() -> None:
    good = chaos_router.Chaos(sent=10, ended=Counter({"200": 9, "left": 1}))
    assert good.misses(memory=True) == []
    good.left = {"inflight": 1.0}
    good.end_bytes = 1 << 30
    good.sent = 11
    good.restarts = 1
    assert len(good.misses(memory=True)) == 4 and len(good.misses(memory=False)) == 3
    assert chaos_router.Chaos(sent=10, ended=Counter({"503": 10})).misses(memory=False)


# -- the small forms of `make promises`


def kept(numbers: list[promises.Number]) -> bool:
    assert all(n.is_kept for n in numbers), "\n".join(map(str, numbers))
    return bool(numbers)


@pytest.mark.rule("R8")
def test_r8_the_memory_of_an_index_that_was_filled_and_emptied_comes_back() -> None:
    assert kept(promises.memory_of_index(200_000, 30_000))


@pytest.mark.rule("R18")
@pytest.mark.processes
async def test_r18_requests_without_a_worker_take_no_memory(tmp_path: Path) -> None:
    assert kept(await promises.no_workers(tmp_path, 400, at_once=100))


@pytest.mark.rule("R21")
@pytest.mark.processes
async def test_r21_streams_of_a_router_of_processes_are_the_worker_s(tmp_path: Path) -> None:
    assert kept(await promises.digests(tmp_path, 100))


@pytest.mark.rule("R21")
@pytest.mark.processes
async def test_r21_a_client_that_does_not_read_costs_less_than_64_kib(tmp_path: Path) -> None:
    """It was over a MiB: what the kernel held came in one piece, and was kept twice."""
    assert kept(await promises.slow_readers(tmp_path, 200))


@pytest.mark.rule("R33")
def test_r33_a_router_that_restarts_is_warm_within_10_s() -> None:
    """Red with `by_events=False`: an index that starts empty."""
    assert kept(promises.restart(120, 200.0))


def test_a_promise_that_is_not_kept_is_seen() -> None:
    assert not promises.Number("R1", "x", 2, 1, "").is_kept and not promises.Number("R1", "x", 1, 2, "", at_least=True).is_kept
    assert "MISS" in str(promises.Number("R1", "x", 2, 1, "")) and "MISS" not in str(promises.Number("R1", "x", 1, 1, ""))
