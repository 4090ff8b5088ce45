"""Tells a child process that hangs from one that only waits for a CPU. The supervisor looks, each child beats; both know nothing else.

A child's event loop writes to an eventfd each second. Silence counts only as far as the process could have run: not the time that its
main thread stood in line for a CPU (another program, a quota of its cgroup), waited for a disk, or was held by a debugger. What is left is
a loop that does not go round: stopped, asleep in a call, or busy without an end.

Sources: eventfd(2); proc(5), /proc/PID/stat; kernel docs, scheduler/sched-stats, /proc/PID/schedstat: the leader thread's nanoseconds on a
CPU and in line for one.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Final

from fleet_router.grid import call_on_tick

BEAT_S: Final = 1.0
LOOK_S: Final = 2.0  # between two looks; a look that comes late, since the supervisor had to wait itself, counts as no more than two
START_S: Final = 60.0  # until the first beat: imports, from a slow disk
_NOT_ITS_OWN: Final = "DtZX"  # waits for a disk, held by a debugger, ended


@dataclass(frozen=True, slots=True)
class Sight:
    """A process's main thread at one moment."""

    state: str  # the kernel's letter: R runs or stands in line, S sleeps, T is stopped
    ran_ns: int
    waited_ns: int  # in line for a CPU


class Watch:
    """One child process, from its start on. Pure."""

    def __init__(self, now: float) -> None:
        self.looked_at = now
        self._last: Sight | None = None
        self._in_line_s = 0.0  # left out of the silence, and not yet in the kernel's sum
        self.has_beaten = False
        self.silent_s = 0.0  # since its last beat, as far as it could have run

    def beaten(self, now: float) -> None:
        """It has beaten since the last look."""
        self.has_beaten = True
        self.looked_at, self._last, self.silent_s, self._in_line_s = now, None, 0.0, 0.0

    def silent(self, now: float, sight: Sight | None) -> None:
        """It has not. Args: sight: None where the kernel tells nothing; then all silence counts."""
        passed, last = min(now - self.looked_at, 2 * LOOK_S), self._last
        self.looked_at, self._last = now, sight
        if sight is None:
            self.silent_s += passed
        elif last is not None and sight.state not in _NOT_ITS_OWN:
            if sight.state == "R" and sight.ran_ns == last.ran_ns:  # the kernel adds its wait up when that ends
                self._in_line_s += passed
                return
            waited = (sight.waited_ns - last.waited_ns) / 1e9
            more, self._in_line_s = max(0.0, waited - self._in_line_s), max(0.0, self._in_line_s - waited)
            self.silent_s = max(0.0, self.silent_s + passed - more)

    def hangs(self, limit_s: float) -> bool:
        """It is to be replaced."""
        return self.silent_s > (limit_s if self.has_beaten else max(limit_s, START_S))


def see(pid: int) -> Sight | None:
    """What the kernel tells of a process; None where it tells nothing."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat") as f:
            words = f.read().rpartition(")")[2].split()
    except OSError:
        return None
    try:
        with open(f"/proc/{pid}/schedstat") as f:
            ran, waited, _ = map(int, f.read().split())
    except (OSError, ValueError):
        ran, waited = (int(words[11]) + int(words[12])) * (1_000_000_000 // os.sysconf("SC_CLK_TCK")), 0
    return Sight(words[0], ran, waited)


def take_beats(fd: int) -> bool:
    """Whether there were beats since the last call."""
    try:
        return os.eventfd_read(fd) > 0
    except BlockingIOError:
        return False


def beat_for_ever(fd: int) -> None:
    """In the child, on its running loop. `fd` below 0: nobody watches."""
    if fd < 0:
        return
    loop = asyncio.get_running_loop()

    def beat() -> None:
        os.eventfd_write(fd, 1)
        call_on_tick(loop, BEAT_S, beat)

    beat()
