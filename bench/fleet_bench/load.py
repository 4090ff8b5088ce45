"""Plays sessions against a server: closed loop, or open loop with given arrival times. Gives one Record a request.

In the open modes a request's latencies count from the time it was due, also when the client or its limit of open requests was late:
else a slow server would lower the load that measures it (coordinated omission).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fleet_bench.client import Client
from fleet_bench.clock import Clock
from fleet_bench.datasets import History, Session
from fleet_bench.exchange import Target, perform
from fleet_bench.record import Record


@dataclass(slots=True)
class Run:
    """What all requests of a run share."""

    client: Client
    target: Target
    clock: Clock
    on_record: Callable[[Record], None] = lambda _: None  # called when a request has ended
    records: list[Record] = field(default_factory=list)
    _session: Iterator[int] = field(default_factory=count)

    async def play(self, session: Session, due_s: float | None) -> None:
        """All turns of a session; ends at the first that fails. `due_s`: when its first turn should have been sent; None: now."""
        number, history = next(self._session), History(chat=self.target.endpoint == "chat")
        for n, turn in enumerate(session.turns):
            origin = due_s if due_s is not None and n == 0 else self.clock()
            record = Record(len(self.records), number, n, origin)
            self.records.append(record)
            last = n == len(session.turns) - 1
            await perform(self.client, self.target, history.prompt(turn), turn.max_tokens, record, self.clock, keep_text=not last)
            self.on_record(record)
            if not record.ok:
                return
            history.answered(record.text)
            record.text = ""


async def closed_loop(run: Run, sessions: Iterator[Session], *, concurrency: int, duration_s: float | None = None) -> None:
    """`concurrency` sessions at any time until `sessions` ends or, after `duration_s`, no new one is begun."""
    stop_s = None if duration_s is None else run.clock() + duration_s

    async def player() -> None:
        for session in sessions:  # shared: each session is taken by one player
            await run.play(session, None)
            if stop_s is not None and run.clock() >= stop_s:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(player())


async def open_loop(
    run: Run,
    arrivals: Iterable[tuple[float, Session]],
    *,
    max_open: int | None = None,
    duration_s: float | None = None,
    sleep: Callable[[float], Any] = asyncio.sleep,
) -> None:
    """Begins each session at its time (seconds from now), whatever came of those before. `max_open`: most at once; later ones wait, and it counts."""
    gate = asyncio.Semaphore(max_open) if max_open is not None else nullcontext()
    start = run.clock()

    async def begin(session: Session, due_s: float) -> None:
        async with gate:
            await run.play(session, due_s)

    async with asyncio.TaskGroup() as group:
        for at_s, session in arrivals:
            if duration_s is not None and at_s >= duration_s:
                break
            await sleep(max(0.0, start + at_s - run.clock()))  # also 0: those that are due get their turn
            group.create_task(begin(session, start + at_s))
