"""How many Events a service may get: one that flaps all day must not fill the API server's store. Read by `reconcile` before each Event."""

from __future__ import annotations

from datetime import datetime
from typing import Final

BURST: Final = 20
REFILL_S: Final = 300.0  # one more in so many seconds


class EventBudget:
    """A bucket of tokens for each service uid; a full one is forgotten with its service."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, datetime]] = {}  # tokens, and when that was

    def take(self, uid: str, now: datetime) -> bool:
        """True when one more Event may be written."""
        tokens, at = self._left.get(uid, (float(BURST), now))
        tokens = min(float(BURST), tokens + max(0.0, (now - at).total_seconds()) / REFILL_S)
        self._left[uid] = (tokens - 1 if tokens >= 1 else tokens, now)
        return tokens >= 1

    def forget(self, uid: str) -> None:
        """The service is gone."""
        self._left.pop(uid, None)
