"""Several routers in front of the same workers: what they tell one another, as a pure thing and over real sockets (R31, R32)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from fleet_contract.worker import LoadReport, Seen
from fleet_router.brain.polled import load_of_others
from fleet_router.brain.reports import snapshot
from fleet_router.decide.load import WAIT, Load, LoadTable, Pick, SlotLoad, Speed
from fleet_router.decide.peers import SILENT_S, PeerBook, PeerMessage, PickFacts, WishFacts, WorkerPicks
from fleet_router.engines.base import PolledLoad
from fleet_router.metrics import render
from fleet_router.observed import RouterFacts
from fleet_router.replay import gates, trace
from fleet_router.replay.simulate import Machine, Options, Simulation
from fleet_router.supervisor import bind
from fleet_testing.fake_events import FakePublisher
from fleet_testing.fake_worker import FakeWorker, Script
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import RouterProcess, until, until_async

WORKERS = (("w0", 0, "life"), ("w1", 0, "life"))
SPEED = Speed(1000.0, 0.01, 0.0, 0.0, 100_000)


class Router:
    """The load model of one router, without sockets."""

    def __init__(self, name: str, others: list[str]) -> None:
        self.name = name
        self.table = LoadTable()
        self.book = PeerBook(self.table, name)
        self.book.expect(others)
        for slot, identity in enumerate(WORKERS):
            self.book.worker_added(identity, self.table.add(slot, SPEED))

    def on(self, worker: int) -> SlotLoad:
        return self.table.slots[worker]

    def hear(self, key: str, message: PeerMessage | None, now: float = 0.0) -> None:
        if message is not None:
            self.book.take(key, wire(message), now)


def wire(message: PeerMessage) -> PeerMessage:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=PeerMessage)


def pair() -> tuple[Router, Router]:
    """Two that know one another."""
    a, b = Router("a.1", ["b"]), Router("b.1", ["a"])
    a.hear("b", b.book.everything(0.0))
    b.hear("a", a.book.everything(0.0))
    return a, b


# -- the sum


class Peers(RuleBasedStateMachine):
    """However messages are lost, routers restarted and reports taken: when all have heard a whole state, every sum is the truth."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.now, self.seq, self.lives = 0.0, 0, 0
        self.routers: dict[str, Router] = {}
        self.open: list[tuple[Router, int, Pick]] = []
        self.arrived: dict[int, dict[str, set[int]]] = {0: {}, 1: {}}
        for name in self.NAMES:
            self.restart(name)

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        self.open = [(router, worker, pick) for router, worker, pick in self.open if router is not self.routers.get(name)]
        self.lives += 1
        self.routers[name] = Router(f"{name}.{self.lives}", list(self.NAMES))

    @rule(name=st.sampled_from(NAMES), worker=st.integers(0, 1), pend=st.integers(0, 500), arrives=st.booleans())
    def pick(self, name: str, worker: int, pend: int, arrives: bool) -> None:
        router = self.routers[name]
        pick = router.on(worker).pick(pend, pend + 10, pend + 50, self.now)
        self.open.append((router, worker, pick))
        if arrives:
            self.arrived[worker].setdefault(router.name, set()).add(pick.number)

    @rule(at=st.integers(0, 7))
    def start(self, at: int) -> None:
        if self.open:
            router, worker, pick = self.open[at % len(self.open)]
            router.on(worker).start(pick, self.now)

    @rule(at=st.integers(0, 7))
    def end(self, at: int) -> None:
        if self.open:
            router, worker, pick = self.open.pop(at % len(self.open))
            router.on(worker).release(pick)

    @rule(worker=st.integers(0, 1), hears=st.sets(st.sampled_from(NAMES)))
    def report(self, worker: int, hears: set[str]) -> None:
        """A worker says what it has; some routers hear it."""
        self.seq += 1
        seen = {name: Seen(max(numbers), sorted(set(range(max(numbers))) - numbers)) for name, numbers in self.arrived[worker].items()}
        report = LoadReport(seq=self.seq, pend=10, run=2, ctx=30, seen=seen)
        for name in hears:
            self.routers[name].on(worker).take_report(report, self.routers[name].name, self.now)

    @rule(name=st.sampled_from(NAMES), hears=st.sets(st.sampled_from(NAMES)), whole=st.booleans())
    def tell(self, name: str, hears: set[str], whole: bool) -> None:
        """One message; who does not hear it has lost it."""
        book = self.routers[name].book
        message = book.everything(self.now) if whole else book.changes(self.now)
        for other in hears:
            self.routers[other].hear(name, message, self.now)

    @rule(seconds=st.floats(0.01, 2 * SILENT_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for router in self.routers.values():
            router.table.tick(self.now)
            router.book.tick(self.now)

    @rule()
    def after_a_whole_exchange_all_know_the_truth(self) -> None:
        for name in self.NAMES:
            self.tell(name, set(self.NAMES), True)
        for router in self.routers.values():
            assert router.book.live == router.book.expected == router.table.routers - 1 == 2
            router.table.check_integrity()
            for worker in (0, 1):
                assert router.on(worker).now() == self.truth(router, worker)

    def truth(self, router: Router, worker: int) -> Load:
        """The worker's last report, and what it does not hold."""
        report = router.on(worker).report
        pend, run, ctx = (report.pend, report.run, report.ctx) if report is not None else (0, 0, 0)
        rows, committed = run, ctx + pend
        for owner, at, pick in self.open:
            seen = report.seen.get(owner.name) if report is not None else None
            if at != worker or (seen is not None and pick.number <= seen.up_to and pick.number not in seen.missing):
                continue
            rows, committed = rows + 1, committed + pick.room_tokens
            if pick.started:
                run, ctx = run + 1, ctx + pick.prompt_tokens
            else:
                pend += pick.pend_tokens
        return Load(pend, run, rows, ctx, committed)

    def teardown(self) -> None:
        self.after_a_whole_exchange_all_know_the_truth()


Peers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPeers: Any = pytest.mark.rule("R31")(Peers.TestCase)


def test_a_report_that_comes_before_the_pick_it_holds_still_counts_it_once() -> None:
    a, b = pair()
    a.on(0).pick(100, 200, 300, 0.0)
    b.on(0).take_report(LoadReport(seq=1, pend=100, seen={"a.1": Seen(up_to=0)}), "b.1", 0.0)
    b.hear("a", a.book.changes(0.0))
    assert b.on(0).now().pend == 100
    a.on(0).pick(40, 200, 300, 0.0)
    b.hear("a", a.book.changes(0.0))
    assert b.on(0).now().pend == 140


def test_a_message_says_how_things_are_so_twice_is_once() -> None:
    a, b = pair()
    first = a.on(0).pick(100, 200, 300, 0.0)
    gone = a.on(1).pick(7, 8, 9, 0.0)
    a.on(1).release(gone)
    message = a.book.changes(0.0)
    assert message is not None and a.book.changes(0.0) is None
    for _ in range(2):
        b.hear("a", message)
        assert (b.on(0).now(), b.on(1).now()) == (Load(100, 0, 1, 0, 300), Load())
    a.on(0).start(first, 1.0)
    b.hear("a", a.book.changes(0.0))
    assert b.on(0).now() == a.on(0).now() == Load(0, 1, 1, 200, 300)


def test_a_router_that_is_silent_or_leaves_or_is_not_expected_any_more_is_taken_out_of_the_sum() -> None:
    for how in ("silent", "leaves", "not expected"):
        a, b = pair()
        a.on(0).pick(100, 200, 300, 0.0)
        b.hear("a", a.book.changes(0.0))
        assert b.on(0).now().pend == 100 and b.table.routers == 2
        if how == "silent":
            assert b.book.tick(SILENT_S) == []
            assert [p.key for p in b.book.tick(SILENT_S + 0.1)] == ["a"] and b.book.tick(SILENT_S + 0.2) == []
            assert b.book.expected == 1
        elif how == "leaves":
            b.hear("a", a.book.farewell())
            assert b.book.expected == 0 and b.book.tick(100.0) == []
        else:
            b.book.expect([])
        assert b.on(0).now() == Load() and b.table.routers == 1 and b.book.live == 0
        b.hear("a", PeerMessage("a.1", workers=[WorkerPicks("w0", 0, "life", [PickFacts(1, 5, 5, 5)])]))
        assert b.on(0).now() == Load(), "changes of a state that is not known"


def test_a_restarted_router_replaces_its_former_life_at_once() -> None:
    a, b = pair()
    a.on(0).pick(100, 200, 300, 0.0)
    b.hear("a", a.book.everything(0.0))
    again = Router("a.2", ["b"])
    again.on(0).pick(30, 40, 50, 0.0)
    b.hear("a", again.book.everything(0.0))
    assert b.on(0).now() == Load(30, 0, 1, 0, 50) and b.book.live == 1


def test_our_own_address_and_a_second_one_of_another_router_count_nothing() -> None:
    a = Router("a.1", ["me", "b", "b again"])
    b = Router("b.1", [])
    a.on(0).pick(100, 200, 300, 0.0)
    b.on(0).pick(5, 6, 7, 0.0)
    a.hear("me", a.book.everything(0.0))
    a.hear("b", b.book.everything(0.0))
    a.hear("b again", b.book.everything(0.0))
    assert a.on(0).now().pend == 105 and a.book.live == 1 and a.table.routers == 2
    a.book.tick(SILENT_S + 1)
    a.hear("b again", b.book.everything(0.0))
    assert a.on(0).now().pend == 105, "the second address speaks on when the first is silent"


def test_a_worker_that_is_found_later_has_what_others_told_of_it() -> None:
    a, b = pair()
    b.book.worker_gone(b.on(0))
    b.table.remove(0)
    a.on(0).pick(100, 200, 300, 0.0)
    b.hear("a", a.book.changes(0.0))
    b.book.worker_added(WORKERS[0], b.table.add(0, SPEED))
    assert b.on(0).now().pend == 100
    b.table.check_integrity()


def test_what_others_cannot_know_yet_weighs_once_for_each_router() -> None:
    a, _ = pair()
    a.book.expect(["b", "c"])
    a.hear("c", Router("c.1", []).book.everything(0.0))
    pick = a.on(0).pick(1000, 1000, 1000, 0.0)
    assert a.on(0).column[WAIT] == pytest.approx(3.0) and a.on(0).now().pend == 1000
    a.table.check_integrity()
    a.book.changes(0.0)
    assert a.on(0).column[WAIT] == pytest.approx(1.0)
    a.on(0).start(pick, 1.0)
    assert a.on(0).column[WAIT] == 0.0


def test_prompts_of_other_routers_do_not_make_a_worker_look_slow() -> None:
    a, b = pair()
    theirs = a.on(0).pick(1000, 1000, 1000, 0.0)
    b.hear("a", a.book.changes(0.0))
    ours = b.on(0).pick(1000, 1000, 1000, 0.0)
    a.on(0).start(theirs, 1.0)
    b.hear("a", a.book.changes(0.0), 1.0)
    b.on(0).start(ours, 2.0)
    assert b.on(0).prefill_rate == pytest.approx(1000.0)


def test_all_routers_reckon_with_the_same_speed_of_a_worker() -> None:
    a, b = pair()
    a.on(0).prefill.add(100.0, 50.0)
    assert a.on(0).prefill_rate == b.on(0).prefill_rate == pytest.approx(1000.0), "nobody knows it yet"
    b.hear("a", a.book.everything(0.0))
    assert a.on(0).prefill.factor > 1.5 and 1000 < a.on(0).prefill_rate < 1500 and a.on(0).prefill_rate == pytest.approx(b.on(0).prefill_rate)
    b.table.check_integrity()
    b.hear("a", a.book.farewell())
    assert b.on(0).prefill_rate == pytest.approx(1000.0)


def test_picks_of_others_are_taken_off_what_a_foreign_engine_says() -> None:
    a, b = pair()
    a.on(0).pick(100, 100, 200, 0.0)
    b.hear("a", a.book.changes(0.0))
    assert load_of_others(PolledLoad(running=1, waiting=0, used_tokens=200), b.on(0)).run == 0


def test_the_bytes_on_the_wire_stay_as_they_are_and_older_and_newer_writers_are_understood() -> None:
    pick = PickFacts(3, 100, 200, 300, False, [(4, 1 << 63)], 51.5)
    wish = WishFacts("uid", 0, "life", 0.25, 500, True)
    workers = [WorkerPicks("uid", 0, "life", [pick], [1], (1.5, 0.5))]
    message = PeerMessage("r.0", True, False, workers, [wish], [("k.tokens", 2.0)])
    data = bytes.fromhex(
        "96a3722e30c3c29196a375696400a46c69666591970364ccc8cd012cc2919204cf8000000000000000cb4049c00000000000910192cb3f"
        "f8000000000000cb3fe00000000000009196a375696400a46c696665cb3fd0000000000000cd01f4c39192a86b2e746f6b656e73cb4000000000000000"
    )
    assert msgspec.msgpack.encode(message) == data
    assert msgspec.msgpack.decode(data, type=PeerMessage) == message
    older = bytes.fromhex("94a3722e30c3c29195a375696400a46c69666591950364ccc8cd012cc39101")
    assert msgspec.msgpack.decode(older, type=PeerMessage) == PeerMessage(
        "r.0", True, False, [WorkerPicks("uid", 0, "life", [PickFacts(3, 100, 200, 300, True)], [1])]
    )
    newer = ["r.0", False, False, [], None, None, "new"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=PeerMessage) == PeerMessage("r.0")


# -- in the simulated fleet


@pytest.mark.rule("R31")
@pytest.mark.parametrize(("scale", "share"), [(1, 1.08), (4, 1.08), (6, 1.25)])
def test_r31_four_routers_that_tell_each_other_within_5_ms_are_nearly_as_good_as_one(scale: int, share: float) -> None:
    """At 6 requests wait for tens of seconds."""
    log = trace.scaled(trace.built_in(), scale)

    def mean(**options: Any) -> float:
        runs = [Simulation(log, gates.BUILT_IN_SETTINGS[0].machine, "ours", seed=seed, options=Options(**options)).run() for seed in (1, 2)]
        return sum(r.ttft_mean for r in runs) / len(runs)

    one, four = mean(), mean(brains=4)
    assert four <= share * one, (one, four)
    if scale == 4:
        assert mean(brains=4, cut=(0.0, 1e9)) > 1.15 * one, "and without telling they are not"


@pytest.mark.rule("R31")
def test_r31_after_a_partition_all_sums_are_whole_again() -> None:
    log = trace.scaled(trace.built_in(sessions=120, seconds=200.0), 4.0)
    options = Options(brains=4, cut=(10.0, 20.0))
    simulation = Simulation(log, Machine(4, 3000), "ours", options=options)
    simulation.run()
    shared = simulation.shared
    assert shared is not None
    shared.share(1e6)
    for brain, book in zip(shared.brains, shared.books, strict=True):
        brain.fleet.check_integrity()
        assert book.live == 3 and all(load.now() == Load() for load in brain.fleet.load.slots.values())


# -- over real sockets


@pytest.fixture
async def make_routers(make_fleet: MakeFleet) -> Callable[..., Awaitable[list[Fleet]]]:
    """Routers on this loop that know one another's ports; each gets the same list."""

    async def make(count: int, *workers: FakeWorker) -> list[Fleet]:
        sockets = [bind("127.0.0.1", 0, "--peer-port") for _ in range(count)]
        addresses = tuple(f"127.0.0.1:{s.getsockname()[1]}" for s in sockets)
        fleets = [
            await make_fleet(*workers, router_id=f"r{n}", peer_port=address_port(s), peers=addresses, peer_socket=s) for n, s in enumerate(sockets)
        ]
        await until(lambda: all(f.brain.peers() == {"expected": count - 1, "live": count - 1} for f in fleets), "all hear all")
        return fleets

    return make


def address_port(s: socket.socket) -> int:
    return int(s.getsockname()[1])


def loads(fleet: Fleet) -> list[tuple[int, int, int, int]]:
    return [(w["pend"], w["run"], w["ctx"], w["kvUsed"]) for w in sorted(fleet.told(), key=lambda w: w["address"])]


@pytest.mark.rule("R31")
async def test_every_router_counts_what_the_others_have_in_flight_and_no_request_twice(
    make_worker: MakeWorker, make_routers: Callable[..., Awaitable[list[Fleet]]]
) -> None:
    workers = [await make_worker(), await make_worker()]
    go = asyncio.Event()
    for w in workers:
        w.default = Script(wait=go)
    fleets = await make_routers(3, *workers)
    chats = [asyncio.create_task(f.chat("x" * 400)) for f in fleets for _ in range(2)]
    await until(lambda: sum(len(w.legs) for w in workers) == 6, "all are there")
    await until(lambda: len({tuple(loads(f)) for f in fleets}) == 1 and sum(x[0] for x in loads(fleets[0])) > 2400, "the same load everywhere")
    assert [len(w.legs) for w in workers] == [3, 3], "each pick saw those before it, of whichever router"
    assert [f.inflight() for f in fleets] == [2, 2, 2], "but only its own is for a drain to wait for"
    for w in workers:
        picks = [leg.routed.pick for leg in w.legs if leg.routed.pick is not None]
        seen = {router: Seen(max(n for r, n in picks if r == router)) for router, _ in picks}
        await w.publish(pend=1234, run=0, seen=seen)
    await until(lambda: all([x[0] for x in loads(f)] == [1234, 1234] for f in fleets), "the worker's word stands for all its requests")
    go.set()
    assert [r.status_code for r in await asyncio.gather(*chats)] == [200] * 6
    for f in fleets:
        await f.idle()
    await until(lambda: all(not load.others for f in fleets for load in f.brain.deciding.load.slots.values()), "nothing is left")


@pytest.mark.rule("R31")
async def test_a_silent_router_is_dropped_counted_and_taken_back_when_it_speaks_again(
    make_worker: MakeWorker, make_routers: Callable[..., Awaitable[list[Fleet]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_router.decide.peers.SILENT_S", 1.5)
    worker = await make_worker()
    go = asyncio.Event()
    worker.default = Script(wait=go)
    first, second = await make_routers(2, worker)
    chat = asyncio.create_task(first.chat("x" * 400))
    await until(lambda: loads(second)[0][0] > 400, "the pick is known there")
    exchange = first.edge.host._peers
    send, exchange._send = exchange._send, lambda message: None
    await until(lambda: second.brain.peers() == {"expected": 1, "live": 0}, "it is silent")
    assert loads(second)[0][0] == 0 and second.counter("peer_silences_total") == 1
    text = render(snapshot(second.brain, 0))
    assert 'radixfleet_router_peers{state="live"} 0' in text and 'radixfleet_router_peers{state="expected"} 1' in text
    exchange._send = send
    await until(lambda: loads(second)[0][0] > 400, "it is back, with what it has in flight")
    go.set()
    assert (await chat).status_code == 200
    await first.edge.host._peers.close()
    await until(lambda: second.brain.peers() == {"expected": 0, "live": 0}, "it took its leave")
    first.edge.host._peers = None
    assert second.counter("peer_silences_total") == 1


async def test_a_router_that_was_frozen_reads_what_the_others_said_before_it_drops_them(
    make_worker: MakeWorker, make_routers: Callable[..., Awaitable[list[Fleet]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: after a pause of its machine it forgot what the other routers have in flight."""
    monkeypatch.setattr("fleet_router.decide.peers.SILENT_S", 1.5)
    fleets = await make_routers(2, await make_worker())
    await until(lambda: all(f.brain.peers() == {"expected": 1, "live": 1} for f in fleets), "both know the other")
    time.sleep(2.0)  # noqa: ASYNC251 the whole process stands still
    await asyncio.sleep(0.3)
    assert [f.counter("peer_silences_total") for f in fleets] == [0, 0]


@pytest.mark.rule("R31")
async def test_r31_what_comes_together_leaves_together_and_waits_for_2_ms_at_most(
    make_worker: MakeWorker, make_routers: Callable[..., Awaitable[list[Fleet]]]
) -> None:
    (fleet,) = await make_routers(1, await make_worker())
    exchange, loop = fleet.edge.host._peers, asyncio.get_running_loop()
    sent: list[PeerMessage] = []
    exchange._send = sent.append
    load = fleet.brain.deciding.load.slots[0]
    exchange._sent_at = loop.time() - 1.0
    picks = [load.pick(100, 100, 100, 0.0) for _ in range(5)]
    assert not isinstance(exchange._sending, asyncio.TimerHandle), "nothing was said of late: it leaves in this turn of the loop"
    await until(lambda: sent, "it left")
    assert [len(w.picks) for w in sent[0].workers] == [5]
    exchange._sent_at = loop.time()
    load.release(picks[0])
    assert isinstance(exchange._sending, asyncio.TimerHandle) and exchange._sending.when() <= exchange._sent_at + 0.002 + 1e-6
    load.start(picks[1], 1.0)
    await until(lambda: [m for m in sent[1:] if not m.whole], "the rest left")
    (rest,) = [m for m in sent[1:] if not m.whole]
    assert [(w.ended, [p.started for p in w.picks]) for w in rest.workers] == [([0], [True])]


async def test_router_pods_of_a_snapshot_are_read_and_we_know_ourselves(
    make_worker: MakeWorker, make_fleet: MakeFleet, make_routers: Callable[..., Awaitable[list[Fleet]]]
) -> None:
    (other,) = await make_routers(1, await make_worker())
    port = other.edge.settings.peer_port
    own = bind("127.0.0.2", port, "--peer-port")
    fleet = await make_fleet(*other.workers, peer_port=port, peer_socket=own)
    exchange = fleet.edge.host._peers
    pods = [
        RouterFacts("me", "127.0.0.2"),
        RouterFacts("other", "127.0.0.1"),
        RouterFacts("starting"),
        RouterFacts("dead", "127.0.0.3", terminal=True),
    ]
    exchange.set_routers(pods, port)
    await until(lambda: fleet.brain.peers() == {"expected": 1, "live": 1}, "one other")
    exchange.set_routers(pods[:1], port)
    assert fleet.brain.peers() == {"expected": 0, "live": 0} and fleet.counter("peer_silences_total") == 0


@pytest.mark.rule("R32")
async def test_r32_two_routers_explain_the_same_within_a_second_of_quiet(
    make_worker: MakeWorker, make_routers: Callable[..., Awaitable[list[Fleet]]]
) -> None:
    workers = [await make_worker(), await make_worker()]
    publishers = [await FakePublisher(w).start() for w in workers]
    fleets = await make_routers(2, *workers)
    go = asyncio.Event()
    prompt = list(range(260))  # of a prompt that is cached to its end the last page is computed all the same
    await publishers[1].store(prompt[:256])
    workers[0].default = workers[1].default = Script(wait=go)
    chat = asyncio.create_task(fleets[0].chat("x" * 300))
    await until(lambda: sum(len(w.legs) for w in workers) == 1, "one is in flight")

    async def explained(fleet: Fleet) -> Any:
        told = await fleet.edge.service.explain(msgspec.json.encode({"model": "tiny", "prompt": prompt}))
        # to the millisecond: who picked expects the prompt to be cached there, which fills that cache a little more in its own eyes
        return [{k: round(v, 3) if isinstance(v, float) else v for k, v in w.items() if k != "chosen"} for w in told["workers"]]

    async def equal() -> bool:
        one, two = [await explained(f) for f in fleets]
        return bool(one == two and {w["hitTokens"] for w in one} == {0, 256})

    await until_async(equal, "both explain the same", 1.0)
    go.set()
    assert (await chat).status_code == 200
    for p in publishers:
        await p.stop()


@pytest.mark.rule("R32")
async def test_where_a_prompt_of_another_router_went_is_known_for_workers_without_events(
    make_worker: MakeWorker, make_routers: Callable[..., Awaitable[list[Fleet]]]
) -> None:
    workers = [await make_worker(), await make_worker()]
    first, second = await make_routers(2, *workers)
    for fleet in (first, second):
        fleet.keep_speeds()
    assert all(first.brain.index.is_by_history(slot) for slot in (0, 1))
    text = "a long chat that is told by a few of its keys " * 40
    assert (await first.chat(text)).status_code == 200
    took = next(w for w in workers if w.legs)

    async def explained(fleet: Fleet) -> tuple[list[int], list[float]]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        told = await fleet.edge.service.explain(msgspec.json.encode(body))
        return [w["hitTokens"] for w in told["workers"]], [w["wait"] for w in told["workers"]]

    async def known() -> bool:
        (one, _), (two, waits) = await explained(first), await explained(second)
        least, most = max(one) * 15 // 16 - 64, max(one)
        # and that the first turn is over: while it was computed, its worker was as dear as one that has to compute it itself
        return most > 1000 and min(two) == 0 and least <= max(two) <= most and not any(waits)

    await until_async(known, "the other router sends its next turn to the same worker", 2.0)
    before = len(took.legs)
    assert (await second.chat(text)).status_code == 200
    assert len(took.legs) == before + 1


@pytest.mark.rule("R31")
async def test_of_what_waits_at_two_routers_the_better_goes_first(
    make_worker: MakeWorker, make_routers: Callable[..., Awaitable[list[Fleet]]]
) -> None:
    worker = await make_worker()
    first, second = await make_routers(2, worker)
    go = asyncio.Event()
    worker.default = Script(wait=go)
    long = "x" * 20_000
    holding = asyncio.create_task(first.chat(long))
    await until(lambda: len(worker.legs) == 1, "it is busy")
    await until(lambda: loads(second)[0][0] > 10_000, "and both know")
    other = asyncio.create_task(first.chat("y" * 20_000))
    await until(lambda: first.brain.deciding.rivals.ours, "one waits here")
    await until(lambda: second.brain.deciding.rivals.any, "which the other knows")
    again = asyncio.create_task(second.chat(long))
    await until(lambda: second.brain.deciding.rivals.ours and first.brain.deciding.rivals.any, "a better one waits there")
    go.set()
    answers = await asyncio.gather(holding, other, again)
    assert [a.status_code for a in answers] == [200] * 3
    owners = [leg.routed.pick[0] for leg in worker.legs if leg.routed.pick is not None]
    assert owners == [first.brain.pick_id, second.brain.pick_id, first.brain.pick_id]
    await until(lambda: not any(f.brain.deciding.rivals.any or f.brain.deciding.rivals.ours for f in (first, second)), "nothing waits any more")


@pytest.mark.processes
async def test_a_brain_process_of_its_own_shares_too_and_its_port_survives_it(
    make_worker: MakeWorker, make_fleet: MakeFleet, make_router: Callable[..., Awaitable[RouterProcess]]
) -> None:
    worker = await make_worker()
    s = bind("127.0.0.1", 0, "--peer-port")
    flags = ("--static", worker.url, "--workers", "2", "--peer-port", "0", "--peers", f"127.0.0.1:{address_port(s)}")
    router = await make_router(*flags)
    fleet = await make_fleet(worker, peer_port=0, peers=(f"127.0.0.1:{router.announced['peerPort']}",), peer_socket=s)
    await until(lambda: fleet.brain.peers()["live"] == 1, "heard here")

    async def heard_there() -> bool:
        return bool((await router.get("/readyz")).get("peers") == {"expected": 1, "live": 1})

    await until_async(heard_there, "heard there")
    brain = router.child("fleet_router.brain.process")
    assert brain is not None
    life = next(iter(fleet.edge.host._peers._book.peers.values())).router
    brain.kill()
    await until(lambda: [p.known and p.router != life for p in fleet.edge.host._peers._book.peers.values()] == [True], "the next brain is heard")
    await until_async(heard_there, "and hears")
