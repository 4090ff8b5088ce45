"""How often the router may try again, and whom it leaves alone meanwhile: a retry budget and a breaker per worker.

Both are plain state machines without a clock: the caller passes `now` in seconds, which never falls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

BUDGET_SHARE: Final = 0.1  # retries per request
BUDGET_FLOOR: Final = 10.0  # retries that a quiet router may make
BUDGET_LIFE_S: Final = 60.0

WINDOW_S: Final = 20.0
FAULTS_IN_ROW: Final = 3
FAULT_SHARE: Final = 0.5
MIN_ANSWERS: Final = 10  # before a share means anything
OPEN_S: Final = 2.0
MAX_OPEN_S: Final = 30.0


class RetryBudget:
    """Retries are at most a tenth of the requests of the last minute, and a few more where there were hardly any.

    Without it a fleet in trouble gets more work the more it fails.
    """

    def __init__(self, parts: int = 1) -> None:
        """`parts`: the router has so many such budgets, one per edge."""
        self._floor = max(1.0, BUDGET_FLOOR / parts)
        self._tokens = self._floor
        self._at = 0.0

    def request(self, now: float) -> None:
        """A first attempt: a tenth of a retry more."""
        self._refill(now)
        self._tokens += BUDGET_SHARE

    def take(self, now: float) -> bool:
        """Whether one retry is allowed; if so it is spent."""
        self._refill(now)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _refill(self, now: float) -> None:
        """What was saved up fades to the floor; what was overspent comes back, both within a minute."""
        share = min(1.0, max(0.0, now - self._at) / BUDGET_LIFE_S)
        self._at = max(self._at, now)
        self._tokens += (self._floor - self._tokens) * share


@dataclass(slots=True)
class Breaker:
    """One worker's. Closed: everything passes. Open: nothing. Half open: one probe decides.

    Only faults of the worker itself are told to it: connections that break, answers that are none. Never 4xx, 429 or a busy 503.
    """

    state: str = "closed"  # closed open half-open
    pause_s: float = OPEN_S  # of the next or present time that it is open
    _answers: deque[tuple[float, bool]] = field(default_factory=deque)  # (when, was a fault)
    _in_row: int = 0
    _until: float = 0.0
    _probing: bool = False

    def allows(self, now: float) -> bool:
        """Whether the worker may be chosen. Changes nothing but the passage from open to half open."""
        if self.state == "open" and now >= self._until:
            self.state, self._probing = "half-open", False
        return self.state == "closed" or (self.state == "half-open" and not self._probing)

    def picked(self) -> None:
        """A request goes to it: in the half-open state this one is the probe."""
        if self.state == "half-open":
            self._probing = True

    def undecided(self) -> None:
        """A request ended without saying anything about the worker (the client left, the request was wrong)."""
        self._probing = False

    def success(self, now: float) -> None:
        """It answered as a worker should. While open this is an answer of before, which decides nothing."""
        self._in_row = 0
        if self.state == "closed":
            self._note(now, fault=False)
        elif self.state == "half-open":
            self.state, self._probing, self.pause_s = "closed", False, OPEN_S
            self._answers.clear()

    def fault(self, now: float) -> None:
        """It failed as a worker."""
        self._in_row += 1
        if self.state == "half-open":
            self.pause_s = min(MAX_OPEN_S, 2 * self.pause_s)
            self._open(now)
            return
        self._note(now, fault=True)
        faults = sum(f for _, f in self._answers)
        if self.state == "closed" and (
            self._in_row >= FAULTS_IN_ROW or (len(self._answers) >= MIN_ANSWERS and faults >= FAULT_SHARE * len(self._answers))
        ):
            self._open(now)

    def _open(self, now: float) -> None:
        self.state, self._until, self._probing = "open", now + self.pause_s, False

    def _note(self, now: float, *, fault: bool) -> None:
        self._answers.append((now, fault))
        while self._answers and (now - self._answers[0][0] > WINDOW_S or len(self._answers) > 1000):
            self._answers.popleft()
