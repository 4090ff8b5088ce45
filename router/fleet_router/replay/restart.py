"""A router that restarts in the middle of a log (rule R33): its index is read anew from the workers' snapshots, what runs is adopted.

From its end until it has read, requests wait in front of it: a router that is not warm is not ready. Learned speeds and what history knew
are gone. Everything that decides is the product's own, as in `simulate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fleet_router.decide.keys import STRIDE
from fleet_router.decide.lives import GPU
from fleet_router.decide.load import Pick

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet_router.replay.model import Job, Worker
    from fleet_router.replay.simulate import OurChooser

READ_S: Final = 2.0  # process start, first polls, replay or snapshot of every worker


@dataclass(frozen=True, slots=True)
class Restart:
    """When, in seconds of the log."""

    at: float
    read_s: float = READ_S


class RestartedChooser:
    """One chooser until the restart, then another. Is a `simulate.Chooser`."""

    share_at = math.inf

    def __init__(self, old: OurChooser, make_new: Callable[[], OurChooser], workers: list[Worker], restart: Restart, *, by_events: bool) -> None:
        self._now_serving: OurChooser | None = old
        self._make_new = make_new
        self._workers = workers
        self._restart = restart
        self._by_events = by_events
        self._is_new = False
        self._outside: list[Job] = []
        self._with_workers: dict[int, Job] = {}
        self._adopted: dict[int, tuple[OurChooser, Pick]] = {}

    @property
    def most_waiting_s(self) -> float:
        return self._now_serving.most_waiting_s if self._now_serving is not None else 0.0

    def arrive(self, job: Job, now: float) -> list[tuple[Job, int]]:
        placed = self._pass(now)
        if self._now_serving is None:
            self._outside.append(job)
            return placed
        return placed + self._placed(self._now_serving.arrive(job, now))

    def first_token(self, job: Job, now: float) -> None:
        if job.number in self._adopted:
            brain, pick = self._adopted[job.number]
            brain.fleet.load.slots[job.worker].start(pick, now, seen=False)
        elif self._now_serving is not None:
            self._now_serving.first_token(job, now)

    def done(self, job: Job, now: float) -> None:
        del self._with_workers[job.number]
        if job.number in self._adopted:
            brain, pick = self._adopted.pop(job.number)
            brain.fleet.load.slots[job.worker].release(pick)
        elif self._now_serving is not None:
            self._now_serving.done(job, now)

    def freed(self, now: float) -> list[tuple[Job, int]]:
        placed = self._pass(now)
        return placed + (self._placed(self._now_serving.freed(now)) if self._now_serving is not None else [])

    def poll(self) -> None:
        pass

    def share(self, now: float) -> list[tuple[Job, int]]:
        return []

    def _pass(self, now: float) -> list[tuple[Job, int]]:
        """Time has passed: the old one may end, the new one may be ready."""
        if self._is_new or now < self._restart.at:
            return []
        if self._now_serving is not None:
            self._outside += self._now_serving.waiting_jobs()  # their clients come again
            self._now_serving = None
        if now < self._restart.at + self._restart.read_s:
            return []
        self._is_new, self._now_serving = True, self._make_new()
        self._adopt(self._now_serving, now)
        outside, self._outside = self._outside, []
        return [placed for job in outside for placed in self._placed(self._now_serving.arrive(job, now))]

    def _adopt(self, new: OurChooser, now: float) -> None:
        for slot, worker in enumerate(self._workers):
            for block in worker.blocks if self._by_events else ():
                assert new.fleet.index.store(slot, GPU, 0, block, block, STRIDE) == "stored"
        for job in self._with_workers.values():
            request, started = job.request, job.first_token >= 0
            tokens = (0 if started else request.input_tokens, request.input_tokens, request.input_tokens + request.output_tokens)
            self._adopted[job.number] = (new, new.fleet.load.slots[job.worker].adopt(*tokens, now, started=started))

    def _placed(self, placed: list[tuple[Job, int]]) -> list[tuple[Job, int]]:
        self._with_workers.update((job.number, job) for job, _ in placed)
        return placed
