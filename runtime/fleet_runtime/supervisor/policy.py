"""When a dead child is started again, and what its death is called. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Final

SCHEDULER_RESTARTS: Final = 3
SCHEDULER_WINDOW_S: Final = 600.0
BACKOFF_S: Final = (0.0, 0.1, 0.5, 2.0, 5.0, 10.0)
STEADY_S: Final = 60.0  # a child that lived this long starts its back-off anew


@dataclass(slots=True)
class SchedulerBudget:
    """At most SCHEDULER_RESTARTS within SCHEDULER_WINDOW_S: a worker that needs more is better replaced."""

    restarts: list[float] = field(default_factory=list)

    def take(self, now: float) -> bool:
        """True, and counted, when one more restart is allowed at `now` (seconds)."""
        self.restarts = [t for t in self.restarts if now - t < SCHEDULER_WINDOW_S]
        if len(self.restarts) >= SCHEDULER_RESTARTS:
            return False
        self.restarts.append(now)
        return True


@dataclass(slots=True)
class Backoff:
    """Delays between restarts of http or the detokenizer: bounded, never giving up; they hold nothing that could be lost."""

    failures: int = 0

    def delay(self, lived_s: float) -> float:
        """Seconds to wait after a life of `lived_s`."""
        if lived_s >= STEADY_S:
            self.failures = 0
        delay = BACKOFF_S[min(self.failures, len(BACKOFF_S) - 1)]
        self.failures += 1
        return delay


def death_in_words(who: str, returncode: int) -> str:
    """`scheduler was killed by SIGKILL (often: out of memory)`. `returncode` as subprocess gives it: negative is a signal."""
    if returncode >= 0:
        return f"{who} exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (often: out of memory)" if returncode == -signal.SIGKILL else ""
    return f"{who} was killed by {name}{hint}"
