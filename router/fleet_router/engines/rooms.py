"""Numbers of rooms: what the legs of a pair meet by. Never used twice by a process, below 2**63, congruent to the prefill's rank.

The decode side finds the prefill's rank as `room % dp_size` (SGLang's bootstrap protocol). n of `room = n * dp_size + rank` counts up
from a random start of 40 bits, so that two routers do not meet either.
"""

from __future__ import annotations

import secrets
from typing import Final

START_BITS: Final = 40
MAX_DP_SIZE: Final = 1 << 20  # keeps a room below 2**63 for 2**42 further attempts


class Rooms:
    """One counter of this process."""

    def __init__(self, start: int | None = None) -> None:
        self._n = 1 + (secrets.randbits(START_BITS) if start is None else start)
        self._turn = 0

    def take(self, choices: int = 1, *, dp_size: int = 1) -> tuple[int, ...]:
        """Rooms of one attempt, one per choice, in sequence; ranks take turns."""
        dp_size = max(1, min(dp_size, MAX_DP_SIZE))
        n, self._n = self._n, self._n + choices
        rank, self._turn = self._turn % dp_size, self._turn + 1
        first = n * dp_size + rank
        return tuple(range(first, first + choices))


ROOMS: Final = Rooms()
