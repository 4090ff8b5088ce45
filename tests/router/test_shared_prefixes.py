"""What routers tell one another of prompts and of what waits: few keys of each pick, wishes for workers (R31, R32)."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.decide.fleet import Decision, Fleet, Taken
from fleet_router.decide.history import History
from fleet_router.decide.index import SETTLE_S
from fleet_router.decide.load import Load, Speed
from fleet_router.decide.peers import PeerBook
from fleet_router.decide.queue import Waiting
from fleet_router.decide.rivals import PATIENCE_S, Rivals, Wish
from fleet_router.decide.rule import Ask, Member, Pool
from fleet_router.decide.told import GRID, MAX_KEYS, checked, some

SPEED = Speed(1000.0, 0.01, 0.0, 0.0, 64 * 400)
BLOCK = 64


def prompt(*parts: tuple[str, int]) -> list[int]:
    """Chain keys of a prompt made of named parts of so many blocks."""
    names = [f"{name}{n}" for name, blocks in parts for n in range(blocks)]
    return [hash(tuple(names[: n + 1])) & ((1 << 64) - 1) for n in range(len(names))]


class Router:
    """The deciding half of one router, without sockets."""

    def __init__(self, name: str, other: str, *, by_history: bool = False, workers: int = 2) -> None:
        self.fleet = Fleet(random.Random(1).randrange)
        self.book = PeerBook(self.fleet.load, name, self.fleet.rivals, self.fleet)
        self.book.expect([other])
        self.pool = Pool(tuple(Member(slot, f"w{slot}", "unified") for slot in range(workers)))
        for slot in range(workers):
            self.book.worker_added((f"w{slot}", 0, "life"), self.fleet.add_worker(slot, SPEED, by_history=by_history))
        self.fleet.set_pools({"p": self.pool})

    def decide(self, keys: list[int], now: float = 0.0) -> Decision:
        decision = self.fleet.decide(self.pool, Ask(BLOCK * len(keys), 1), keys, now)
        assert decision is not None
        return decision

    def send(self, keys: list[int], now: float = 0.0) -> Taken:
        return self.fleet.take(self.decide(keys, now), keys, now, key="p")

    def hits(self, keys: list[int]) -> list[float]:
        return self.fleet.look_up(keys).gpu[:2].tolist()


def tell(one: Router, other: Router, now: float = 0.0) -> None:
    message = one.book.changes(now)
    if message is not None:
        other.book.take(message.router[0], message, now)


def pair(*, by_history: bool = False, workers: int = 2) -> tuple[Router, Router]:
    a, b = Router("a.1", "b", by_history=by_history, workers=workers), Router("b.1", "a", by_history=by_history, workers=workers)
    a.book.take("b", b.book.everything(0.0), 0.0)
    b.book.take("a", a.book.everything(0.0), 0.0)
    return a, b


# -- keys


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_few_keys_are_told_and_the_last_of_the_grid_is_among_them(blocks: int, held: int) -> None:
    keys = list(range(1000, 1000 + blocks))
    told = some(keys, min(held, blocks))
    assert len(told) <= MAX_KEYS and checked(told) == told and all(key == keys[depth - 1] for depth, key in told)
    last = max((d for d in GRID if d <= blocks), default=0)
    assert not told or told[-1][0] == last
    assert told or last <= held, "something new, and nothing told of it"
    assert blocks - last <= blocks / 16


def test_of_what_another_router_says_only_usable_depths_count() -> None:
    assert checked([(33, 1), (32, 2), (4, 3), (0, 4), (-1, 5), (64, 6)]) == [(32, 2), (64, 6)]
    assert len(checked([(n, n) for n in range(1, 20)])) == MAX_KEYS


@pytest.mark.rule("R32")
@pytest.mark.parametrize("by_history", [False, True])
def test_a_prefix_is_foreseen_where_another_router_sent_it(by_history: bool) -> None:
    a, b = pair(by_history=by_history)
    system = prompt(("system", 40))
    taken = a.send(prompt(("system", 40), ("first", 10)))
    to = taken.decision.chosen.serving
    tell(a, b)
    again = prompt(("system", 40), ("first", 10), ("second", 2))
    assert b.hits(again)[to] >= 48 * BLOCK and b.hits(again)[1 - to] == 0, "the whole prompt, but for the grid"
    assert b.hits(system)[to] >= 20 * BLOCK, "and at least half of what a shared beginning is"
    b.fleet.check_integrity()
    a.fleet.first_token(taken, 1.0)
    tell(a, b, 1.0)
    assert b.decide(again, 1.0).chosen.serving == to
    b.fleet.tick(1.0 + SETTLE_S / 2)
    assert b.hits(again)[to] > 0
    b.fleet.tick(1.0 + SETTLE_S)
    assert (b.hits(again)[to] > 0) == by_history, "then the worker's own events tell; without events it is remembered"
    a.fleet.release(taken)
    tell(a, b, 2.0)
    assert (b.hits(again)[to] > 0) == by_history
    b.fleet.check_integrity()


def test_what_was_foreseen_goes_with_its_pick_its_router_and_its_worker() -> None:
    keys = prompt(("x", 40))
    for how in ("ended", "left", "worker gone"):
        a, b = pair()
        taken = a.send(keys)
        tell(a, b)
        assert max(b.hits(keys)) > 0
        if how == "ended":
            a.fleet.release(taken)
            tell(a, b)
        elif how == "left":
            b.book.take("a", a.book.farewell(), 0.0)
        else:
            for slot in (0, 1):
                b.book.worker_gone(b.fleet.load.slots[slot])
                b.fleet.remove_worker(slot)
                b.fleet.add_worker(slot, SPEED, by_history=False)
        assert max(b.hits(keys)) == 0 and b.fleet.tick(0.0) is None
        b.fleet.check_integrity()
        assert not b.fleet.index.is_told


def test_a_prompt_of_ours_behind_a_told_one_is_named_block_by_block() -> None:
    a, b = pair(by_history=True)
    first = prompt(("x", 40))
    to = a.send(first).decision.chosen.serving
    tell(a, b)
    held = b.fleet.index.held_tokens(to)
    assert held == 40 * BLOCK
    longer = prompt(("x", 40), ("y", 3))
    for load in b.fleet.load.slots.values():
        load.forget_others("a.1")
    assert b.send(longer).decision.chosen.serving == to
    assert b.fleet.index.held_tokens(to) == 43 * BLOCK, "nothing counts twice"
    assert b.fleet.index.hit_blocks(to, longer) == 43 and not b.fleet.index.is_told
    b.fleet.check_integrity()


TREE = [prompt(("s", a), (f"m{b}", c)) for a in (0, 3, 9) for b in range(3) for c in (1, 7, 20)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(TREE), st.integers(0, 8)), max_size=30), st.integers(5, 80))
def test_prompts_of_ours_and_of_others_share_one_bounded_history(steps: list[tuple[bool, list[int], int]], capacity: int) -> None:
    held: set[int] = set()
    told: set[int] = set()
    history = History(capacity, held.add, held.remove, told.add, told.remove)
    for is_ours, keys, known in steps:
        if is_ours:
            history.use(keys)
            assert len(keys) > capacity or held.issuperset(keys)
        else:
            history.use_told(some(keys, min(known, len(keys) - 1)))
        history.check_integrity()
        assert set(history.held_keys()) == held and set(history.told_keys()) == told and not held & told


# -- what waits


def test_a_worker_is_left_to_the_better_wish_for_as_long_as_news_takes() -> None:
    rivals, slots = Rivals(), np.array([0, 1])
    m = np.ones((9, 2))
    m[4], m[5], m[7] = 50.0, 100.0, 1.0  # committed, capacity, rows
    levels, wanted = np.array([[0.5, 0.5]]), np.array([[True, True]])
    rivals.set_theirs("b", {0: (Wish(0.1, 60), Wish(0.4, 30)), 1: (Wish(0.2, 60),)})
    assert rivals.leave(slots, m, levels, wanted, 0.0).tolist() == [[False, True]], "where it fits"
    rivals.look(0.0)
    assert rivals.look_again_at == PATIENCE_S
    assert rivals.leave(slots, m, levels, wanted, PATIENCE_S / 2).tolist() == [[False, True]]
    assert rivals.leave(slots, m, levels, wanted, PATIENCE_S).tolist() == [[True, True]], "a wish out of date stops nobody"
    rivals.took(0)
    assert rivals.leave(slots, m, levels, wanted, PATIENCE_S).tolist() == [[False, True]], "one request of ours passed, no more"
    assert rivals.leave(slots, m, np.array([[0.3, 0.3]]), wanted, 1.0).tolist() == [[True, True]], "ours is better now"


@pytest.mark.rule("R31")
def test_the_best_waiting_request_goes_first_whichever_router_it_waits_at() -> None:
    a, b = pair(workers=1)
    system = prompt(("system", 20))
    holder = b.send(system)
    b.fleet.first_token(holder, 0.5)
    tell(b, a, 0.5)
    filler = a.send(prompt(("other", 30)), 0.5)  # two seconds of prompt: nobody is open
    tell(a, b, 0.5)
    for router, keys in ((a, prompt(("new", 20))), (b, prompt(("system", 20), ("turn", 1)))):
        request = Waiting(Ask(BLOCK * len(keys), 1), keys, 0.6, 60.0)
        assert router.fleet.offer("p", request, 0.6) is None and router.fleet.pump("p", 0.6) is None
    assert a.fleet.rivals.ours and b.fleet.rivals.ours
    a.book.take("b", b.book.everything(0.6), 0.6)
    b.book.take("a", a.book.everything(0.6), 0.6)
    a.fleet.first_token(filler, 1.0)  # a knows at once that the worker is free, b after a while
    assert a.fleet.pump("p", 1.0) is None, "the better one waits there"
    tell(a, b, 1.004)
    found = b.fleet.pump("p", 1.004)
    assert found is not None
    b.fleet.take(found[1], found[0].keys, 1.004, key="p")
    tell(b, a, 1.008)
    assert not b.fleet.rivals.ours and not a.fleet.rivals.any
    found = a.fleet.pump("p", 1.008)
    assert found is not None, "and now the other one"
    assert a.fleet.load.slots[0].now() != Load()


def test_who_comes_while_others_wait_elsewhere_takes_its_turn() -> None:
    a, b = pair()
    b.fleet.rivals.set_ours(np.array([0]), {0: (Wish(0.0, 10),)})
    tell(b, a)
    a.book.take("b", b.book.everything(0.0), 0.0)
    keys = prompt(("x", 4))
    assert a.fleet.at_once("p", Ask(256, 1), keys, 0.0) is None
    a.fleet.set_pools({"p": a.pool, "another": Pool(a.pool.alone[1:])})
    assert a.fleet.at_once("another", Ask(256, 1), keys, 0.0) is not None, "nobody waits for the workers of that pool"
    a.book.take("b", b.book.farewell(), 0.0)
    assert a.fleet.at_once("p", Ask(256, 1), keys, 0.0) is not None
