"""The queue with late binding (R18, R35-R37), and the deciding half as a whole, on a clock of its own."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet_contract.worker import Profile
from fleet_router.decide.fleet import Decision, Fleet, Taken
from fleet_router.decide.load import WAIT, LoadTable, Speed
from fleet_router.decide.queue import CLASS_WEIGHTS, CacheQueue, QueueFull, QueueRules, Waiting
from fleet_router.decide.rule import Ask, Hits, Member, Pool

RATE = 1000.0
SPEED = Speed.of(Profile(RATE, 0.01), 1_000_000)
RULES = QueueRules(theta_s=1.0, max_requests=5000, max_requests_per_tenant=5000)
FOREVER = 1e9


class World:
    """Workers that compute one prompt after another, and answers that end at once."""

    def __init__(self, workers: int, rules: QueueRules = RULES, speed: Speed = SPEED) -> None:
        self.fleet = Fleet(random.Random(1).randrange, rules)
        for slot in range(workers):
            self.fleet.add_worker(slot, speed, by_history=True, learn=False)
        self.fleet.set_pools({"p": Pool(tuple(Member(n, f"w{n}", "unified") for n in range(workers)))})
        self.now = 0.0
        self.running: list[list[tuple[float, Taken, str]]] = [[] for _ in range(workers)]
        self.waits: dict[str, list[float]] = {}
        self.most_pending = 0.0
        self.order: list[str] = []

    def send(self, tokens: int, *, name: str = "", keys: tuple[int, ...] = (), deadline: float = FOREVER, **more: Any) -> Waiting:
        request = Waiting(Ask(tokens, 10), keys, self.now, deadline, tag=name, **more)
        decision = self.fleet.offer("p", request, self.now)
        if decision is not None:
            self._run(decision, request)
        self.pump()
        return request

    def pump(self) -> None:
        while (found := self.fleet.pump("p", self.now)) is not None:
            self._run(found[1], found[0])

    def _run(self, decision: Decision, request: Waiting) -> None:
        slot = decision.chosen.serving
        self.most_pending = max(self.most_pending, float(self.fleet.load.matrix[WAIT, slot]))
        taken = self.fleet.take(decision, request.keys, self.now, key="p")
        queue = self.running[slot]
        begins = queue[-1][0] if queue else self.now
        queue.append((max(begins, self.now) + taken.picks[0][1].pend_tokens / RATE, taken, request.tag))
        self.waits.setdefault(request.tenant, []).append(self.now - request.arrived)
        self.order.append(request.tag)

    def until(self, end: float) -> None:
        """Lets the workers work."""
        while True:
            due = [(q[0][0], n) for n, q in enumerate(self.running) if q]
            at, n = min(due) if due else (end, -1)
            if at > end or n < 0:
                break
            self.now = max(self.now, at)
            _, taken, _ = self.running[n].pop(0)
            self.fleet.first_token(taken, self.now)
            self.fleet.release(taken)
            self.pump()
        self.now = max(self.now, end)
        self.fleet.tick(self.now)
        self.pump()

    @property
    def queued(self) -> int:
        return sum(len(q) for q in self.fleet.queues.values())


def test_a_request_goes_at_once_while_a_worker_is_open() -> None:
    world = World(2)
    for n in range(4):
        world.send(900, name=str(n))
    assert world.queued == 0 and [len(q) for q in world.running] == [2, 2]


@pytest.mark.rule("R35")
def test_r35_no_worker_ever_has_more_than_theta_and_one_request_waiting() -> None:
    world = World(8)
    rng = random.Random(2)
    for _ in range(1000):
        world.send(rng.randrange(100, 2000))
    assert world.queued > 900
    world.until(10.0)
    assert world.most_pending < RULES.theta_s
    assert all(sum(t.picks[0][1].pend_tokens for _, t, _ in q) / RATE <= RULES.theta_s + 2.0 for q in world.running)
    world.until(1000.0)
    assert world.queued == 0 and len(world.order) == 1000
    world.fleet.check_integrity()


def test_of_those_that_wait_the_one_with_most_of_its_prompt_cached_goes_first() -> None:
    world = World(1)
    world.send(1280, name="warm", keys=tuple(range(20)))
    world.until(2.0)
    world.send(3000, name="busy", keys=(99,))
    for name, keys in (("cold", tuple(range(500, 520))), ("hit", tuple(range(20)))):
        world.send(1280, name=name, keys=keys)
    world.until(60.0)
    assert world.order == ["warm", "busy", "hit", "cold"]


def test_requests_that_wait_see_what_the_ones_before_them_will_leave() -> None:
    """Prompts with one long beginning: each worker computes it at most once, though all of them waited before anybody had it."""
    world = World(2)
    for n in range(2):
        world.send(3000, name=f"busy{n}", keys=(1000 + n,))
    for n in range(6):
        world.send(2624, name=f"s{n}", keys=(*range(40), 5000 + n))
    assert world.queued == 6
    computed: list[int] = []
    original = world._run

    def run(decision: Decision, request: Waiting) -> None:
        original(decision, request)
        computed.append(world.running[decision.chosen.serving][-1][1].picks[0][1].pend_tokens)

    world._run = run  # type: ignore[method-assign]
    world.until(60.0)
    assert len(computed) == 6 and sum(tokens > 64 for tokens in computed) <= 2, computed


@pytest.mark.rule("R36")
def test_r36_a_request_waits_for_its_own_worker_but_not_longer_than_the_bound() -> None:
    rules = QueueRules(theta_s=1.0, affinity_s=5.0, max_requests=5000, max_requests_per_tenant=5000)
    world = World(2, rules)
    long = tuple(range(400))
    world.send(25_600, name="prefix", keys=long)
    home = next(n for n, q in enumerate(world.running) if q)
    world.until(0.5)
    request = world.send(25_664, name="mine", keys=(*long, 7))
    assert request.queued, "its own worker is busy for long"
    world.until(4.9)
    assert request.queued and not world.running[1 - home]
    world.until(5.6)
    assert not request.queued and world.running[1 - home][0][2] == "mine"


@pytest.mark.rule("R36")
def test_r36_the_oldest_goes_within_the_bound_after_a_worker_is_open() -> None:
    rng = random.Random(4)
    world = World(4)
    prefixes = [tuple(range(100 * n, 100 * n + 30)) for n in range(12)]
    for n in range(400):
        prefix = rng.choice(prefixes)
        world.send(64 * 31 + rng.randrange(500), name=str(n), keys=(*prefix, 10_000 + n))
        world.until(world.now + 0.1)
    world.until(2000.0)
    assert world.queued == 0
    ordered = [int(name) for name in world.order]
    behind = [n - at for at, n in enumerate(ordered)]
    assert max(abs(b) for b in behind) < 400
    assert max(world.waits[""]) <= 80.0 + RULES.affinity_s  # the whole backlog is about 80 s of work


def test_a_request_that_fits_nowhere_for_long_gets_room() -> None:
    """Small requests would keep both workers fuller than the large one can use."""
    world = World(2, speed=Speed.of(Profile(RATE, 0.01), 10_000))
    held: list[tuple[float, Taken]] = []
    original = world._run

    def run(decision: Decision, request: Waiting) -> None:
        taken = world.fleet.take(decision, request.keys, world.now, key="p")
        world.fleet.first_token(taken, world.now)
        held.append((world.now + 8.0, taken))
        world.order.append(request.tag)

    world._run = run  # type: ignore[method-assign]
    assert original is not None
    large = None
    for step in range(1200):
        world.now = step * 0.1
        for end, taken in [h for h in held if h[0] <= world.now]:
            held.remove((end, taken))
            world.fleet.release(taken)
        if step == 100:
            large = world.send(9_000, name="large")
        world.send(900, name="small")
    assert large is not None and not large.queued
    assert "large" in world.order


# -- fairness


@pytest.mark.rule("R37")
def test_r37_a_heavy_tenant_delays_a_light_one_by_about_theta() -> None:
    world = World(4)
    rng = random.Random(6)
    for tick in range(200):
        for _ in range(10):
            world.send(rng.randrange(500, 1500), name="heavy", tenant="heavy")
        if tick % 10 == 0:
            world.send(800, name="light", tenant="light")
        world.until(world.now + 0.1)
    light = sorted(world.waits["light"])
    assert world.queued > 500
    assert len(light) >= 18 and light[int(0.99 * len(light))] < 2.0, light


@pytest.mark.rule("R37")
def test_r37_tenants_get_tokens_by_their_weights() -> None:
    world = World(2)
    world.send(1500, name="x", tenant="x")
    world.send(1500, name="x", tenant="x")
    queue = world.fleet.queues.setdefault("p", CacheQueue(world.fleet.load, RULES, world.fleet.look_up))
    queue.set_pool(world.fleet.pool("p") or Pool())
    queue.set_tenant_weight("a", 3.0)
    for _ in range(300):
        world.send(1000, name="a", tenant="a")
        world.send(1000, name="b", tenant="b")
    world.until(60.0)
    counts = Counter(world.order)
    assert 2.3 < counts["a"] / counts["b"] < 3.9, counts


def test_classes_get_tokens_by_their_weights_and_batch_only_what_is_left() -> None:
    world = World(2)
    for _ in range(2):
        world.send(1500, name="first")
    for _ in range(60):
        for klass in CLASS_WEIGHTS:
            world.send(1000, name=klass, klass=klass)
    world.until(18.0)  # before anything is old enough to move up
    counts = Counter(world.order)
    assert counts["batch"] == 0 and counts["system"] > counts["interactive"] > counts["default"] > 0, counts
    world.until(1000.0)
    assert Counter(world.order)["batch"] == 60


def test_an_aged_request_moves_up_one_class() -> None:
    """More arrives than the worker can do; without moving up, the batch class would never get anything."""
    world = World(1, QueueRules(theta_s=1.0, affinity_s=3.0))
    world.send(2000, name="first")
    world.send(1000, name="batch", klass="batch")
    for n in range(60):
        world.send(1000, name=f"d{n}")
        world.until(world.now + 0.5)
    assert world.queued > 20
    assert world.order.index("batch") < 10, world.order


# -- bounds


@pytest.mark.rule("R18")
def test_r18_the_queue_is_bounded_in_count_bytes_and_per_tenant() -> None:
    queue = CacheQueue(LoadTable(), QueueRules(max_requests=3, max_bytes=1000, max_requests_per_tenant=2), lambda keys, key_tokens: Hits(np.zeros(8)))

    def put(tenant: str, size: int = 1) -> Waiting:
        request = Waiting(Ask(10, 10), (), 0.0, 5.0, tenant=tenant, size_bytes=size)
        queue.put(request)
        return request

    put("a"), put("a")
    with pytest.raises(QueueFull) as of_tenant:
        put("a")
    with pytest.raises(QueueFull) as of_bytes:
        put("b", 999)
    last = put("b", 998)
    with pytest.raises(QueueFull) as of_all:
        put("c")
    assert [e.value.of_tenant for e in (of_tenant, of_bytes, of_all)] == [True, False, False]
    queue.withdraw(last)
    queue.withdraw(last)
    put("c")
    queue.check_integrity()


@pytest.mark.rule("R18")
def test_r18_what_waits_too_long_is_given_back_with_a_time_to_come_again() -> None:
    world = World(1)
    world.send(10_000, name="first")
    late = [world.send(5_000, name="late", deadline=3.0) for _ in range(2)]
    stays = world.send(5_000, name="stays", deadline=100.0)
    assert world.fleet.too_late(2.9) == []
    found = world.fleet.too_late(3.0)
    assert {id(r) for r, _ in found} == {id(r) for r in late} and all(wait > 10.0 for _, wait in found)
    assert stays.queued and not any(r.queued for r in late)
    world.fleet.check_integrity()


def test_without_workers_requests_wait_for_them() -> None:
    fleet = Fleet(random.Random(1).randrange, RULES)
    assert fleet.offer("p", Waiting(Ask(10, 10), (), 0.0, 9.0, tag="x"), 0.0) is None
    assert fleet.pump("p", 0.1) is None
    fleet.add_worker(0, SPEED, by_history=True)
    fleet.set_pools({"p": Pool((Member(0, "w", "unified"),))})
    found = fleet.pump("p", 0.2)
    assert found is not None and found[0].tag == "x" and found[1].waited_s == pytest.approx(0.2)


def test_excluded_workers_are_not_taken_while_there_are_others() -> None:
    world = World(2)
    assert (world.send(100, exclude=frozenset({0})), [len(q) for q in world.running]) and len(world.running[1]) == 1
    for n in range(2):
        world.send(2000, name=f"busy{n}")
    request = world.send(100, exclude=frozenset({1}), name="retry")
    world.until(30.0)
    assert not request.queued


def test_pairs_wait_for_an_open_prefill_and_a_decode_with_room() -> None:
    fleet = Fleet(random.Random(1).randrange, RULES)
    for slot in range(2):
        fleet.add_worker(slot, Speed.of(Profile(RATE, 0.01), 5_000), by_history=True, learn=False)
    fleet.set_pools({"p": Pool(prefill=(Member(0, "p", "prefill"),), decode=(Member(1, "d", "decode"),))})
    decision = fleet.offer("p", Waiting(Ask(3000, 100), (), 0.0, FOREVER), 0.0)
    assert decision is not None and (decision.chosen.prefill, decision.chosen.serving) == (0, 1)
    first = fleet.take(decision, (), 0.0, key="p")
    assert fleet.offer("p", Waiting(Ask(3000, 100), (), 0.0, FOREVER), 0.0) is None
    fleet.first_token(first, 3.0)
    fleet.release(first, 0)
    assert fleet.pump("p", 3.0) is None  # the prefill is open, but the decode has no room
    fleet.release(first)
    assert fleet.pump("p", 4.0) is not None


@pytest.mark.parametrize("decodes", [(), (Member(2, "d", "decode", transfer_backends=("rdma",)),)])
def test_a_prefill_without_anybody_to_hand_over_to_takes_nothing_that_waits(decodes: tuple[Member, ...]) -> None:
    fleet = Fleet(random.Random(1).randrange, RULES)
    for slot in range(3):
        fleet.add_worker(slot, SPEED, by_history=True, learn=False)
    fleet.set_pools({"p": Pool((Member(0, "u", "unified"),), (Member(1, "p", "prefill", transfer_backends=("tcp",)),), decodes)})
    decision = fleet.offer("p", Waiting(Ask(3000, 100), (), 0.0, FOREVER), 0.0)
    assert decision is not None and (decision.chosen.prefill, decision.chosen.serving) == (None, 0)
    taken = fleet.take(decision, (), 0.0, key="p")
    assert fleet.offer("p", Waiting(Ask(100, 100), (), 0.0, FOREVER), 0.0) is None
    assert fleet.pump("p", 1.0) is None
    fleet.first_token(taken, 3.0)
    found = fleet.pump("p", 3.0)
    assert found is not None and found[1].chosen.serving == 0


class QueueMachine(RuleBasedStateMachine):
    """Every accepted request leaves exactly once: taken, too late or withdrawn; all counters follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(random.Random(1).randrange, QueueRules(theta_s=1.0, max_requests=12, max_requests_per_tenant=8, affinity_s=4.0))
        for slot in range(2):
            self.fleet.add_worker(slot, SPEED, by_history=True)
        self.pool = Pool(tuple(Member(n, f"w{n}", "unified") for n in range(2)))
        self.fleet.set_pools({"p": self.pool})
        self.now = 0.0
        self.waiting: dict[int, Waiting] = {}
        self.taken: list[Taken] = []

    def keep(self, decision: Decision, request: Waiting) -> None:
        self.taken.append(self.fleet.take(decision, request.keys, self.now, key="p"))

    @rule(
        tokens=st.sampled_from([64, 640, 3200]), root=st.integers(0, 2), tenant=st.sampled_from("ab"), klass=st.sampled_from(list(CLASS_WEIGHTS)),
        patience=st.floats(0.5, 20.0),
    )  # fmt: skip
    def send(self, tokens: int, root: int, tenant: str, klass: str, patience: float) -> None:
        keys = tuple(range(root * 100, root * 100 + tokens // 64))
        request = Waiting(Ask(tokens, 10), keys, self.now, self.now + patience, tenant, klass)
        try:
            decision = self.fleet.offer("p", request, self.now)
        except QueueFull:
            return
        if decision is not None:
            self.keep(decision, request)
        else:
            self.waiting[id(request)] = request

    @rule()
    def pump(self) -> None:
        while (found := self.fleet.pump("p", self.now)) is not None:
            del self.waiting[id(found[0])]
            self.keep(found[1], found[0])

    @rule(at=st.integers(0, 9))
    def first_token(self, at: int) -> None:
        if self.taken:
            self.fleet.first_token(self.taken[at % len(self.taken)], self.now)

    @rule(at=st.integers(0, 9))
    def end(self, at: int) -> None:
        if self.taken:
            self.fleet.release(self.taken.pop(at % len(self.taken)))

    @rule(at=st.integers(0, 9))
    def client_leaves(self, at: int) -> None:
        if self.waiting:
            request = self.waiting.pop(list(self.waiting)[at % len(self.waiting)])
            self.fleet.queues["p"].withdraw(request)

    @rule(seconds=st.floats(0.05, 6.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.tick(self.now)
        for request, _ in self.fleet.too_late(self.now):
            assert request.deadline <= self.now
            del self.waiting[id(request)]

    @rule(slots=st.sampled_from([(0,), (1,), (0, 1), ()]))
    def workers_change(self, slots: tuple[int, ...]) -> None:
        self.fleet.set_pools({"p": Pool(tuple(m for m in self.pool.alone if m.slot in slots))} if slots else {})

    @invariant()
    def adds_up(self) -> None:
        self.fleet.check_integrity()
        assert {id(r) for q in self.fleet.queues.values() for r in q.waiting()} == self.waiting.keys()
        assert all(r.queued for r in self.waiting.values())
        assert sum(len(load.picks) for load in self.fleet.load.slots.values()) == len(self.taken)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueueMachine: Any = QueueMachine.TestCase
