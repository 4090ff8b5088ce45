"""Where the loop's time goes. `busy_ns` is always counted; the parts only while a profile is taken (control call `profile`).

The loop says which stage begins; what it was in before ends there. Waiting for messages and for the executor is outside of all.

Time is the processor time of the loop's thread: where compute threads fill all cores the loop is often set aside for milliseconds, beside a
step that goes on, and that is not its work.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Final

NAMES: Final = ("receive", "admit", "build", "launch", "process", "send", "other")


now_ns: Final = time.thread_time_ns


class Stages:
    """See the module."""

    def __init__(self) -> None:
        self.busy_ns = 0
        self.profiling = False
        self._began = 0
        self._since = 0
        self._stage = ""
        self._round: dict[str, int] = defaultdict(int)
        self.samples: dict[str, list[int]] = defaultdict(list)  # ns per iteration that launched or landed something

    def enter(self, stage: str) -> None:
        """A stage begins."""
        if not self._began:
            self._began = now_ns()
            self._since = self._began
        elif self.profiling:
            now = now_ns()
            self._round[self._stage] += now - self._since
            self._since = now
        self._stage = stage

    def away(self, ns: int) -> None:
        """So many nanoseconds of the current stage were not the loop's."""
        self._began += ns
        self._since += ns

    def leave(self) -> None:
        """The iteration is over."""
        if not self._began:
            return
        now = now_ns()
        self.busy_ns += now - self._began
        self._began = 0
        if self.profiling:
            self._round[self._stage] += now - self._since

    def note(self, stage: str, ns: int) -> None:
        """Adds time that was measured elsewhere."""
        if self.profiling:
            self._round[stage] += ns

    def end_step(self) -> None:
        """A step's round is over: its parts become one sample each."""
        if self.profiling:
            for name, ns in self._round.items():
                self.samples[name].append(ns)
        self._round.clear()

    def start_profile(self) -> None:
        """Forgets what was measured before."""
        self.samples.clear()
        self._round.clear()
        self.profiling = True

    def stop_profile(self, steps: int) -> dict[str, dict[str, float]]:
        """Per stage: mean, median and 99th percentile of microseconds per step, and its share of all."""
        self.profiling = False
        total = sum(sum(values) for values in self.samples.values()) or 1
        out = {}
        for name, values in self.samples.items():
            ordered = sorted(values + [0] * (steps - len(values)))
            out[name] = {
                "mean_us": round(sum(ordered) / max(1, steps) / 1e3, 2),
                "p50_us": round(ordered[len(ordered) // 2] / 1e3, 2),
                "p99_us": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] / 1e3, 2),
                "share": round(sum(values) / total, 4),
            }
        return out
