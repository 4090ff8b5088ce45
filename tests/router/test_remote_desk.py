"""The link between an edge and its brain: the same decisions and counts as without it, and nothing is left whatever breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_contract.errors import ApiError
from fleet_contract.worker import LoadReport, Profile, Seen, WorkerRecord
from fleet_router.brain import reports
from fleet_router.brain.brain import Brain
from fleet_router.brain.desk_server import DeskServer
from fleet_router.brain.registry import Endpoint
from fleet_router.counters import Counters
from fleet_router.desk import Desk, Lease, Want
from fleet_router.edge import safe_rule
from fleet_router.edge.remote_desk import REPORT_EVERY_S, SILENCE_S, RemoteDesk
from fleet_router.link import no_answers
from fleet_router.messages import Ask
from fleet_router.metrics import Snapshot, merge
from fleet_router.settings import Settings
from fleet_router.table import WorkerView
from fleet_testing.desks import acquire
from fleet_testing.router_process import until

ROLES = ("unified", "prefill", "decode", "decode")
KEY = ("demo", "tiny")


def record(n: int, role: str, incarnation: str = "") -> WorkerRecord:
    return WorkerRecord(
        pod_uid=f"pod{n}", incarnation=incarnation or f"{n:016x}", namespace="demo", service="tiny", role=role, revision="aaaaaaaa",
        model_revision="00112233aabbccdd", served_names=["tiny"], kv_capacity_tokens=20_000, transfer_backends=["tcp"],
        profile=Profile(prefill_tokens_per_s=1000.0, step_base_s=0.01),
    )  # fmt: skip


def endpoint(n: int, role: str, **changes: Any) -> Endpoint:
    return Endpoint(**{"key": f"pod{n}", "host": "127.0.0.1", "port": n + 1, "record": record(n, role), "healthy": True, "asked": True} | changes)


def want(prompt: int = 100, answer: int = 50, prefix: int = 0, **changes: Any) -> Want:
    keys = tuple(prefix * 1000 + n for n in range(prompt // 64))
    return Want(KEY, prompt, answer, "aaaaaaaa", keys, **changes)


@dataclass
class World:
    """A brain with workers, and a desk in front of it."""

    brain: Brain
    desk: Desk
    now: list[float]
    server: DeskServer | None = None
    asked: list[asyncio.Task[Lease | None]] = field(default_factory=list)
    waits: list[asyncio.Task[None]] = field(default_factory=list)
    endpoints: list[Endpoint] = field(default_factory=list)

    def leases(self) -> list[Lease]:
        done = [t for t in self.asked if t.done() and not t.cancelled() and t.exception() is None]
        return [lease for t in done if (lease := t.result()) is not None]

    def views(self) -> dict[str, WorkerView]:
        return {w.record.pod_uid: w for w in self.desk.table.services[KEY].workers} if KEY in self.desk.table.services else {}

    async def settle(self) -> None:
        """Until every message under way has been handled."""
        for _ in range(4):
            for _ in range(4):
                await asyncio.sleep(0)
            if isinstance(self.desk, RemoteDesk) and self.desk._connected is not None:
                await self.desk._connected.ask("nothing", timeout_s=5)

    def told(self) -> tuple[Any, ...]:
        """Everything that has to be equal."""
        outcomes = []
        for t in self.asked:
            if not t.done() or t.cancelled():
                outcomes.append((t.done(), "cancelled" if t.done() else ""))
            elif (error := t.exception()) is not None:
                outcomes.append((True, str(error)))
            else:
                lease = t.result()
                legs = [(leg.worker.identity, leg.pick_number) for leg in lease.legs()] if lease is not None else None
                outcomes.append((True, (legs, lease.predicted_tokens, lease.waited_s) if lease is not None else None))
        return reports.workers(self.brain), sorted(self.brain.counters.snapshot({}).counters), dict(self.brain.waiting), outcomes


async def nothing(ask: Ask) -> bytes:
    """The answer to `settle`."""
    return b""


def make_brain(now: list[float], **options: Any) -> Brain:
    settings = Settings(**{"router_id": "r", "static": ("http://x:1",), "max_queue": 4} | options)
    brain = Brain(settings, Counters(), lambda: now[0], draw=lambda n: 0)
    brain.all_asked = lambda: True
    return brain


def local_world(**options: Any) -> World:
    now = [0.0]
    brain = make_brain(now, **options)
    return World(brain, brain, now)


async def connect(desk: RemoteDesk, server: DeskServer) -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(server.make_channel, sock=theirs)
    await loop.create_unix_connection(desk.make_channel, sock=ours)
    await until(lambda: not desk.degraded, "the brain decides", 5)


def make_server(brain: Brain) -> DeskServer:
    server = DeskServer(brain, 1, brain.take_observed)
    server.answer = nothing
    server.start()
    return server


async def remote_world(**options: Any) -> World:
    now = [0.0]
    brain = make_brain(now, **options)
    server = make_server(brain)
    desk = RemoteDesk(brain.settings, Counters(), answer=no_answers, draw=lambda n: 0)
    await connect(desk, server)
    return World(brain, desk, now, server)


def add_workers(world: World, roles: tuple[str, ...] = ROLES) -> None:
    for n, role in enumerate(roles):
        world.endpoints.append(endpoint(n, role))
        world.brain.take_endpoint(world.endpoints[-1])


async def close(*worlds: World) -> None:
    for world in worlds:
        for task in (*world.asked, *world.waits):
            task.cancel()
        await asyncio.gather(*world.asked, *world.waits, return_exceptions=True)
        if isinstance(world.desk, RemoteDesk):
            await world.desk.close()
        if world.server is not None:
            world.server.close()


def apply(world: World, op: tuple[Any, ...]) -> None:
    """One step of a random life."""
    loop, kind = asyncio.get_running_loop(), op[0]
    leases, views = world.leases(), sorted(world.views().items())
    lease = leases[op[1] % len(leases)] if leases and kind in ("first", "leg", "release", "cached", "step") else None
    if kind == "acquire":
        _, prompt, prefix, exclude, *flags = op
        w = want(prompt, prefix=prefix, exclude=[v for n, (_, v) in enumerate(views) if n == exclude], **dict.fromkeys(flags, True))
        world.asked.append(loop.create_task(acquire(world.desk, w, 5.0)))
    elif kind == "cancel" and world.asked:
        world.asked[op[1] % len(world.asked)].cancel()
    elif kind == "wait" and KEY in world.desk.table.services:
        world.waits.append(loop.create_task(world.desk.wait_change(world.desk.table.services[KEY], 60.0)))
    elif kind == "stop waiting" and world.waits:
        world.waits[op[1] % len(world.waits)].cancel()
    elif kind == "blame" and views and op[2]:
        world.desk.blame(views[op[1] % len(views)][1])
    elif kind == "blame" and (leases := world.leases()):
        lease = leases[op[1] % len(leases)]
        if not lease.over:
            lease.praise()
            lease.release()
    elif kind == "health" and world.endpoints:
        changed = world.endpoints[op[1] % len(world.endpoints)]
        changed.healthy = not changed.healthy
        world.brain.take_endpoint(changed)
    elif kind == "restart" and world.endpoints:
        changed = world.endpoints[op[1] % len(world.endpoints)]
        assert changed.record is not None
        changed.record = msgspec.structs.replace(changed.record, incarnation=f"{op[2]:016x}")
        world.brain.take_endpoint(changed)
    elif kind == "report":
        _, n, seq, up_to = op
        told = world.endpoints[n % len(world.endpoints)].record
        assert told is not None
        report = LoadReport(told.incarnation, seq=seq, pend=100, run=1, ctx=50, seen={world.brain.pick_id: Seen(up_to)})
        world.brain.take_load(told.pod_uid, report)
    elif kind == "time":
        world.now[0] += op[1]
        world.brain.deciding.tick(world.now[0])
        world.brain._look()
    elif lease is not None and not lease.over:
        if kind == "first":
            lease.first_token()
        elif kind == "leg":
            lease.release_leg(lease.legs()[op[2] % len(lease.legs())])
        else:  # what is learned reaches the brain with the end
            if kind == "cached":
                lease.cached(op[2])
            elif kind == "step":
                lease.answered(10, op[2] / 100)
            lease.release()


small = st.integers(0, 5)
OPS = st.one_of(
    st.tuples(st.just("acquire"), st.sampled_from((40, 700, 3000)), st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("acquire"), st.just(3000), st.just(1), st.just(9), st.sampled_from(("silent", "any_role", "prompt_only"))),
    st.tuples(st.sampled_from(("first", "release")), small),
    st.tuples(st.sampled_from(("leg", "cached", "step", "blame")), small, st.integers(0, 3)),
    st.tuples(st.sampled_from(("cancel", "wait", "stop waiting", "health")), small),
    st.tuples(st.just("restart"), small, st.integers(100, 200)),
    st.tuples(st.just("report"), small, st.integers(0, 50), st.integers(-1, 3)),
    st.tuples(st.just("time"), st.sampled_from((0.01, 0.5, 2.0, 6.0))),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPS, max_size=25))
def test_a_desk_over_the_link_decides_and_counts_as_the_brain_itself(ops: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        worlds = (local_world(), await remote_world())
        for world in worlds:
            add_workers(world)
            world.brain.pick_id = "r.same"
            await world.settle()
        for op in ops:
            for world in worlds:
                apply(world, op)
                await world.settle()
            assert worlds[0].told() == worlds[1].told(), op
        for world in worlds:
            for task in (*world.asked, *world.waits):
                task.cancel()
            await world.settle()
            for lease in world.leases():
                lease.release()
            await world.settle()
            assert sum(w.inflight for w in world.brain.workers) == 0 and not world.brain.waiting
            assert not any(len(queue) for _, queue in world.brain.queues())
            world.brain.deciding.check_integrity()
        desk = worlds[1].desk
        assert isinstance(desk, RemoteDesk) and not desk._held and not desk._asked and not desk._waits and not desk._busy
        await close(*worlds)

    asyncio.run(run())


async def busy_world() -> World:
    """Every worker has all it may have: the next request waits."""
    world = await remote_world()
    add_workers(world, ("unified",))
    await world.settle()
    world.asked.append(asyncio.ensure_future(acquire(world.desk, want(3000), 5.0)))
    await world.settle()
    assert len(world.leases()) == 1
    return world


async def test_a_lost_edge_gives_back_its_leases_waits_and_places_in_the_queue_at_once() -> None:
    world = await busy_world()
    world.asked.append(asyncio.ensure_future(acquire(world.desk, want(3000, prefix=1), 5.0)))
    world.waits.append(asyncio.ensure_future(world.desk.wait_change(world.desk.table.services[KEY], 60.0)))
    await world.settle()
    (worker,) = world.brain.workers
    assert (worker.inflight, world.brain.waiting, [len(q) for _, q in world.brain.queues()]) == (1, {KEY: 1}, [1])
    assert isinstance(world.desk, RemoteDesk) and world.desk._connected is not None
    world.desk._connected.abort()
    await until(lambda: worker.inflight == 0, "given back", 5)
    assert not world.brain.waiting and not any(len(q) for _, q in world.brain.queues())
    assert await world.asked[1] is not None, "what waited goes by the safe rule"
    world.brain.deciding.check_integrity()
    await close(world)


@pytest.mark.parametrize("how", ["granted", "waiting"])
async def test_a_request_that_leaves_while_its_answer_is_under_way_leaves_nothing(how: str) -> None:
    world = await busy_world()
    (worker,) = world.brain.workers
    task = asyncio.ensure_future(acquire(world.desk, want(20 if how == "waiting" else 3000, prefix=1), 5.0))
    await world.settle()
    if how == "granted":
        world.leases()[0].first_token()  # the worker is free: the grant leaves the brain while the edge takes its request back
        world.leases()[0].release()
        while not task.done():  # its answer is here, and nobody has looked at it
            await asyncio.sleep(0)
            if not world.desk._asked:  # type: ignore[attr-defined]
                break
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await world.settle()
    for lease in world.leases():
        lease.release()
    await world.settle()
    assert worker.inflight == 0 and not any(len(q) for _, q in world.brain.queues())
    await close(world)


async def test_a_new_brain_counts_what_the_edge_has_in_flight_on_the_incarnations_that_still_live() -> None:
    world = await remote_world()
    add_workers(world, ("prefill", "decode", "unified"))
    await world.settle()
    desk = world.desk
    assert isinstance(desk, RemoteDesk) and desk._connected is not None
    for _ in range(6):
        world.asked.append(asyncio.ensure_future(acquire(desk, want(900), 5.0)))
        await world.settle()
    leases = world.leases()
    assert len(leases) == 6
    for lease in leases[:3]:
        lease.first_token()
    before = {w.record.pod_uid: (w.inflight, w.load.now()) for w in world.brain.workers}
    leases[5].release_leg(leases[5].legs()[0])
    desk._connected.abort()
    await until(lambda: bool(desk.degraded), "the brain is gone", 5)
    safe = await acquire(desk, want(900), 5.0)
    assert safe is not None and safe.pick_id not in (world.brain.pick_id, leases[0].pick_id)
    brain = make_brain(world.now)
    server = make_server(brain)
    brain.all_asked = lambda: bool(brain.workers)  # nothing is known yet
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(server.make_channel, sock=theirs)
    await loop.create_unix_connection(desk.make_channel, sock=ours)
    await asyncio.sleep(0.01)
    assert desk.degraded, "a brain without its table does not decide"
    views = dict(world.views())
    brain.take_endpoint(endpoint(0, "prefill"))
    brain.take_endpoint(endpoint(1, "decode"))
    brain.take_endpoint(endpoint(2, "unified", record=record(2, "unified", incarnation="f" * 16)))  # it has restarted
    await until(lambda: not desk.degraded, "the brain decides", 5)
    now = {w.record.pod_uid: w.inflight for w in brain.workers}
    expected = {
        uid: sum(v.record.pod_uid == uid for le in [*leases, safe] for g in le.legs() if not g.released for v in [g.worker]) for uid in before
    }
    assert now == expected | {"pod2": 0}
    assert world.views()["pod0"] is views["pod0"] and views["pod2"].removed and world.views()["pod2"].routable
    report = LoadReport(f"{1:016x}", seq=1, run=5, ctx=5000, seen={"r.old": Seen(7)})
    brain.take_load("pod1", report)
    decode = next(w for w in brain.workers if w.record.role == "decode")
    assert decode.load.now().run == 5, "a report holds all that was there before the brain"
    for lease in [*leases, safe]:
        lease.first_token()
        lease.release()
    await until(lambda: sum(w.inflight for w in brain.workers) == 0, "all is given back", 5)
    brain.deciding.check_integrity()
    assert not desk._held and not desk._busy
    server.close()
    await close(world)


async def test_what_was_asked_of_a_brain_that_dies_is_chosen_by_the_safe_rule() -> None:
    world = await busy_world()
    desk = world.desk
    assert isinstance(desk, RemoteDesk) and desk._connected is not None
    waiting = asyncio.ensure_future(acquire(desk, want(3000, prefix=1), 5.0))
    await world.settle()
    assert not waiting.done()
    desk._connected.abort()
    lease = await waiting
    assert lease is not None and lease.serving.worker.record.pod_uid == "pod0" and lease.serving.pick_number == 0
    again = await acquire(desk, want(3000, prefix=2), 5.0)
    assert again is not None and (again.pick_id, again.serving.pick_number) == (lease.pick_id, 1)
    with pytest.raises(ApiError, match="deciding process is away"):
        await desk.explain(want())
    assert await acquire(desk, want(exclude=list(world.views().values())), 5.0) is None
    await close(world)


async def test_a_brain_that_says_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_router.edge.remote_desk.SILENCE_S", 0.2)
    monkeypatch.setattr("fleet_router.edge.remote_desk.REPORT_EVERY_S", 0.05)
    world = await busy_world()
    assert isinstance(world.desk, RemoteDesk) and world.server is not None
    waiting = asyncio.ensure_future(acquire(world.desk, want(3000, prefix=1), 60.0))
    await world.settle()
    world.server.close()  # no pulse any more
    assert await asyncio.wait_for(waiting, 5) is not None
    assert world.desk.degraded
    await close(world)


async def test_an_edge_that_was_frozen_reads_what_the_brain_said_before_it_leaves_it() -> None:
    """Red before: an edge whose machine had paused left its brain."""
    world = await busy_world()
    assert isinstance(world.desk, RemoteDesk)
    channel = world.desk._connected
    time.sleep(SILENCE_S + 1.0)  # noqa: ASYNC251 the whole process stands still
    await asyncio.sleep(2 * REPORT_EVERY_S)
    assert world.desk._connected is channel and not world.desk.degraded
    await close(world)


async def test_a_worker_that_becomes_ready_while_the_brain_says_no_is_not_missed() -> None:
    world = await remote_world()
    add_workers(world, ("unified",))
    world.endpoints[0].healthy = False
    world.brain.take_endpoint(world.endpoints[0])
    await world.settle()
    asked = asyncio.ensure_future(acquire(world.desk, want(), 5.0))
    await asyncio.sleep(0)
    world.endpoints[0].healthy = True
    world.brain.take_endpoint(world.endpoints[0])  # before the brain reads the question, or after it: one of both orders is the bad one
    assert await asyncio.wait_for(asked, 5) is not None
    await close(world)


async def test_a_request_whose_turn_comes_on_a_worker_that_goes_in_the_same_moment_asks_again() -> None:
    world = await busy_world()
    asked = asyncio.ensure_future(acquire(world.desk, want(3000, prefix=1), 5.0))
    await world.settle()
    (worker,) = world.brain.workers
    assert world.server is not None
    (session,) = world.server._sessions.values()
    for lease in session.leases.values():
        lease.release()
    world.brain._look()  # its turn has come, and nobody has been told
    world.endpoints[0].removed = True
    world.brain.take_endpoint(world.endpoints[0])
    assert await asyncio.wait_for(asked, 5) is None
    assert worker.inflight == 0 and isinstance(world.desk, RemoteDesk) and not world.desk.degraded
    await close(world)


async def test_words_of_another_build_end_the_connection_and_nothing_else() -> None:
    world = await remote_world()
    add_workers(world, ("unified",))
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().create_unix_connection(world.server.make_channel, sock=theirs)  # type: ignore[union-attr]
    for junk in (b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x02\x00\x00\x00\x91\x05"):
        ours.setblocking(False)
        ours.send(junk)
        break
    await asyncio.sleep(0.01)
    assert ours.recv(10) == b""
    ours.close()
    assert await acquire(world.desk, want(), 5.0) is not None
    await close(world)


# -- the safe rule and the sum of metrics: pure


def view(n: int, role: str = "unified", backends: tuple[str, ...] = ("tcp",)) -> WorkerView:
    return WorkerView(n, "h", msgspec.structs.replace(record(n, role), transfer_backends=list(backends)), KEY, f"p{n}", "ready")


def pick(workers: list[WorkerView], keys: tuple[int, ...], busy: Callable[[WorkerView], int] = lambda w: 0, **options: Any) -> Any:
    chosen = safe_rule.choose(workers, keys, busy, **options)
    return tuple(w.slot if w is not None else None for w in chosen) if chosen is not None else None


def test_the_safe_rule_sends_equal_prefixes_to_one_worker_and_spreads_others() -> None:
    workers = [view(n) for n in range(8)]
    found = {key: pick(workers, (1, 2, 3, key, key + 1)) for key in range(400)}
    assert all(pick(workers, (1, 2, 3, key, 99, 98)) == at for key, at in found.items()), "what follows the first blocks changes nothing"
    shares = [sum(at == (n, None) for at in found.values()) for n in range(8)]
    assert min(shares) > 400 / 8 / 2
    fewer = [w for w in workers if w.slot != 3]
    moved = sum(pick(fewer, (1, 2, 3, key)) != at for key, at in found.items() if at != (3, None))
    assert moved == 0, "only the share of the worker that is gone moves"


def test_the_safe_rule_chooses_among_the_two_with_the_fewest_requests() -> None:
    workers = [view(n) for n in range(5)]
    load = {0: 5, 1: 1, 2: 9, 3: 2, 4: 7}
    assert {pick(workers, (key,), lambda w: load[w.slot]) for key in range(50)} == {(1, None), (3, None)}
    assert pick(workers, (), lambda w: load[w.slot]) == (1, None), "a prompt without blocks goes where the least is"


@pytest.mark.parametrize(
    ("workers", "options", "expected"),
    [
        ([], {}, None),
        ([view(0, "prefill")], {}, None),
        ([view(0, "decode")], {}, None),
        ([view(0, "prefill"), view(1, "decode")], {}, (1, 0)),
        ([view(0, "prefill", ("rdma",)), view(1, "decode", ("tcp",))], {}, None),
        ([view(0, "prefill", ("rdma",)), view(1, "decode", ("tcp",)), view(2, "decode", ("rdma", "tcp"))], {}, (2, 0)),
        ([view(0, "prefill")], {"alone": ("unified", "prefill")}, (0, None)),
    ],
)
def test_the_safe_rule_pairs_workers_that_can_hand_over(workers: list[WorkerView], options: dict[str, Any], expected: Any) -> None:
    assert pick(workers, (1,), **options) == expected


def test_the_sum_of_metrics_adds_counters_and_histograms_and_keeps_the_first_gauges() -> None:
    a, b = Counters(), Counters()
    a.add("requests_total", 2, (("path", "x"), ("status", "2xx")))
    b.add("requests_total", 3, (("path", "x"), ("status", "2xx")))
    b.add("aborts_total")
    a.observe_first_byte(0.02)
    b.observe_first_byte(100.0)
    total = merge(a.snapshot({("up", ()): 1}), b.snapshot({("up", ()): 1}), Snapshot())
    assert {(n, labels): v for n, labels, v in total.counters} == {
        ("requests_total", (("path", "x"), ("status", "2xx"))): 5, ("aborts_total", ()): 1,
    }  # fmt: skip
    assert total.gauges == [("up", (), 1)] and sum(total.first_byte) == 2 and total.first_byte_sum == pytest.approx(100.02)
