"""Runs the steps of `up`: each when those it needs are done, side by side where it can, skipped when its result is there already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from fleet_local.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    `run` brings about the result if it is not there, and returns a note about what it did, or None when there was nothing to do: looking comes first,
    so that a step killed anywhere is simply run again.
    """

    name: str
    needs: tuple[str, ...]
    run: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did; `note` is None when its result was there already."""

    name: str
    seconds: float
    note: str | None


def ready_steps(needs: Mapping[str, Sequence[str]], *, done: Collection[str], begun: Collection[str]) -> list[str]:
    """The steps that may start now, in the order of the plan. Pure."""
    return [name for name, before in needs.items() if name not in begun and all(b in done for b in before)]


def run_steps(steps: Sequence[Step], report: Callable[[Outcome], None]) -> list[Outcome]:
    """Runs all. After a failure no further step starts, those that run are awaited, and the first failure is raised."""
    by_name = {s.name: s for s in steps}
    needs = {s.name: s.needs for s in steps}
    if unknown := {n for before in needs.values() for n in before} - set(needs):
        raise ValueError(f"steps need unknown steps: {sorted(unknown)}")
    outcomes: list[Outcome] = []
    failure: BaseException | None = None
    running: dict[Future[Outcome], str] = {}
    begun: set[str] = set()
    with ThreadPoolExecutor(max_workers=len(steps) or 1) as pool:
        while True:
            if failure is None:
                for name in ready_steps(needs, done=[o.name for o in outcomes], begun=begun):
                    begun.add(name)
                    running[pool.submit(_timed, by_name[name])] = name
            if not running:
                break
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                del running[future]
                error = future.exception()
                if error is not None:
                    failure = failure or error
                else:
                    outcomes.append(future.result())
                    report(outcomes[-1])
    if failure is not None:
        raise failure
    if len(outcomes) != len(steps):
        raise ValueError(f"steps wait for one another: {sorted(set(needs) - begun)}")
    return outcomes


def _timed(step: Step) -> Outcome:
    started = time.monotonic()
    note = step.run()
    return Outcome(step.name, time.monotonic() - started, note)


class Progress:
    """Prints one line a step, whole lines only, at once (a reader of the output may act on them)."""

    def __init__(self, write: Callable[[str], None], *, quiet: bool = False) -> None:
        self._write, self._quiet, self._lock = write, quiet, threading.Lock()

    def step(self, outcome: Outcome) -> None:
        note = "already there" if outcome.note is None else outcome.note
        self.say(f"  {outcome.name:<20} {outcome.seconds:6.1f} s  {note}")

    def say(self, text: str) -> None:
        if not self._quiet:
            with self._lock:
                self._write(text)


def wait_until(
    what: str, probe: Callable[[], bool], *, limit_s: float, still_possible: Callable[[], str | None] = lambda: None, pause_s: float = 0.05
) -> None:
    """Polls until `probe` is true. Raises ClusterError after the limit, or as soon as `still_possible` names a reason why it never will be."""
    limit = time.monotonic() + limit_s
    while not probe():
        if reason := still_possible():
            raise ClusterError(reason)
        if time.monotonic() > limit:
            raise ClusterError(f"{what} is not ready after {limit_s:.0f} s; see `radixfleet local logs`")
        time.sleep(pause_s)
