"""Cyclic garbage is found, young and old, and what lives is not looked through again and again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from fleet_router import garbage
from fleet_router.garbage import YOUNG_OBJECTS, Sweeper


class Node:
    """May be in a cycle."""

    def __init__(self) -> None:
        self.other: Any = None


def pair() -> tuple[Node, weakref.ref[Node]]:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return first, weakref.ref(first)


@pytest.fixture
async def sweeper() -> Any:
    before = gc.get_threshold()
    sweeper = Sweeper()
    sweeper.start()
    yield sweeper
    gc.callbacks.remove(sweeper._put_aside)
    gc.unfreeze()
    gc.set_threshold(*before)


def seen_by_a_look() -> int:
    return sum(len(gc.get_objects(generation)) for generation in range(3))


async def test_young_cycles_are_freed_and_what_lives_is_looked_at_once(sweeper: Sweeper) -> None:
    gone = pair()[1]
    kept = [Node() for _ in range(3 * YOUNG_OBJECTS)]
    assert gone() is None
    assert seen_by_a_look() < 1.5 * YOUNG_OBJECTS < len(kept)


async def test_cycles_of_what_was_put_aside_are_freed_once_the_process_has_grown(sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "GROWN_BLOCKS", 1000)
    monkeypatch.setattr(garbage, "GROWN", 1.0)
    first, gone = pair()
    gc.collect(0)
    del first
    gc.collect()
    assert gone() is not None and sweeper.whole == 1
    sweeper.check()
    assert gone() is not None, "it has not grown"
    kept = [object() for _ in range(2000)]
    sweeper.check()
    assert gone() is None and sweeper.whole == 2 and kept
