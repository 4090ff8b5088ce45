"""What the index knows of a worker between two clears: its bit, and who holds what. Used by `index` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from fleet_router.decide.history import History

GPU, HOST, DISK = TIERS = (0, 1, 2)
TOLD: Final = 3  # a table beside those of the tiers: some keys of prompts that other routers sent to a worker, see `told`
TABLES: Final = (*TIERS, TOLD)


class Expectation:
    """Blocks that a pick will make its worker hold. Dropped by `settle` or `cancel`."""

    __slots__ = ("keys", "life", "open", "table")

    def __init__(self, life: Life, keys: Sequence[int], table: int = GPU) -> None:
        self.life = life
        self.keys = keys
        self.table = table
        self.open = True


@dataclass(slots=True, eq=False)
class Life:
    """What is known of one worker since its last clear: its bit, and who holds what."""

    bit: int
    slot: int
    history: History | None = None
    held: list[int] = field(default_factory=lambda: [0] * len(TABLES))  # distinct keys per table
    extra: tuple[dict[int, int], ...] = field(default_factory=lambda: tuple({} for _ in TABLES))  # key -> holders beyond the first
    books: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # (tier, group) -> engine hash -> chain and depth
    repeats: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (tier, group, engine hash) -> stores beyond the first
    inner: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)  # further keys of engine blocks over 64 tokens
    expected: dict[int, Expectation] = field(default_factory=dict)  # open ones, by identity
    entries: int = 0  # engine blocks in all books
    gone: bool = False


@dataclass(slots=True)
class Slot:
    """One worker, whatever its life."""

    life: Life
    limit_entries: int
    capacity_tokens: int
    by_history: bool
    building: Life | None = None  # a snapshot that is being read: events write here, lookups see `life`
    of_bytes: Life | None = None  # keys of bytes; made when the first come
    key_tokens: float = 0.0  # that the last of these were believed to stand for

    @property
    def written(self) -> Life:
        return self.building or self.life


class Retired:
    """A life whose bit is being cleared, in slices."""

    def __init__(self, life: Life, keys: Iterator[tuple[int, int]]) -> None:
        self.life = life
        self.done = False
        self._keys = keys

    def step(self, budget: int, unset: Callable[[Life, int, int], None]) -> int:
        """Clears up to `budget` keys; returns what is left of the budget."""
        while budget > 0:
            found = next(self._keys, None)
            if found is None:
                self.done = True
                return budget
            unset(self.life, *found)
            budget -= 1
        return 0
