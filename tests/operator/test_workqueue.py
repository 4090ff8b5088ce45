"""The work queue against a naive model, with a clock that the test moves."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.facts import Key
from fleet_operator.workqueue import BACKOFF_LIMIT_S, WorkQueue

A, B = Key("ns", "a"), Key("ns", "b")


async def test_a_key_added_twice_is_worked_on_once() -> None:
    queue = WorkQueue()
    queue.add(A)
    queue.add(A)
    assert await queue.get() == A and len(queue) == 0


async def test_a_key_added_while_worked_on_waits_and_is_worked_on_again() -> None:
    queue = WorkQueue()
    queue.add(A)
    await queue.get()
    queue.add(A)
    queue.add(B)
    assert await queue.get() == B
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.done(A)
    assert await asyncio.wait_for(waiting, 60) == A


async def test_an_earlier_wish_wins_over_a_later_one() -> None:
    queue = WorkQueue()
    queue.add(A, after_s=1000)
    queue.add(A)
    assert await asyncio.wait_for(queue.get(), 5) == A
    queue.done(A)
    assert len(queue) == 0


async def test_failures_come_back_later_and_later_up_to_a_limit_and_a_success_forgets_them() -> None:
    now = 0.0
    queue = WorkQueue(clock=lambda: now, jitter=lambda: 1.0)
    waits = []
    for _ in range(12):
        queue.add(A)
        await queue.get()
        waits.append(queue.failed(A))
        now += waits[-1]
    assert waits[:4] == [0.5, 1, 2, 4] and waits[-1] == BACKOFF_LIMIT_S == max(waits)
    await queue.get()
    queue.done(A)
    queue.add(A)
    await queue.get()
    assert queue.failed(A) == 0.5


async def test_many_getters_share_the_keys() -> None:
    queue = WorkQueue()
    getters = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    keys = {Key("ns", str(i)) for i in range(3)}
    for key in keys:
        queue.add(key)
    assert set(await asyncio.wait_for(asyncio.gather(*getters), 5)) == keys


ops = st.lists(st.tuples(st.sampled_from(["add", "later", "get", "done", "failed", "wait"]), st.integers(0, 2)), max_size=40)


@given(ops)
def test_it_does_what_a_naive_queue_does(script: list[tuple[str, int]]) -> None:
    """The model: for each key the earliest wish; a get takes one that is due and not worked on."""
    now = 0.0
    queue = WorkQueue(clock=lambda: now, jitter=lambda: 1.0)
    due: dict[Key, float] = {}
    working: list[Key] = []
    for op, n in script:
        key = Key("ns", str(n))
        if op in ("add", "later"):
            at = now + (5 if op == "later" else 0)
            queue.add(key, after_s=at - now)
            due[key] = min(due.get(key, at), at)
        elif op == "get":
            found, _ = queue._next()
            ready = {k for k, at in due.items() if at <= now and k not in working}
            assert (found in ready) if ready else found is None
            if found is not None:
                del due[found]
                working.append(found)
        elif op == "wait":
            now += n
        elif working:
            finished = working.pop(0)
            if op == "done":
                queue.done(finished)
            else:
                at = now + queue.failed(finished)
                due[finished] = min(due.get(finished, at), at)
        queue.check_integrity()
        assert len(queue) == len(due)
