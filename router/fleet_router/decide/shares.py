"""Who may give how much of a caller's limit: shares that follow demand, among the edges of one router and among routers.

A limit (requests or tokens a minute of one API key) is given out by local buckets, one per edge, each a share of it. A bucket that shrinks
loses what it held in proportion, one that grows begins with what it has: so moving shares never makes units, and where the shares add up
to 1, all edges together give at most the limit at once and the limit a minute, as one bucket would. What a shrinking bucket lost may be
handed to one that wants it.

FLOOR of each limit is split evenly, so that somebody who calls an idle edge is not refused; the rest goes by what was asked for lately. Among
routers the same split is made from what they told one another last, their own numbers included: all compute the same from the same numbers.
Shares of several routers add up to more than 1 only while a message is on its way or lost (a second), or a router is not heard.

Pure; `now` in seconds never falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

FLOOR: Final = 0.1
MEMORY_S: Final = 10.0  # what was asked for loses its weight in this time
FORGOTTEN: Final = 0.01  # demand below this is none
MATTERS: Final = 0.01  # share that is worth a message
MAX_NAMES: Final = 1024  # limits that a router tells others of


class Use(NamedTuple):
    """Of one limit at one edge since its last report."""

    name: str
    wanted: float  # units asked for, given or not
    released: float = 0.0  # units that its bucket lost when it shrank


@dataclass(slots=True)
class _Demand:
    units: float = 0.0
    at: float = 0.0

    def now(self, now: float) -> float:
        return self.units * math.exp(-max(0.0, now - self.at) / MEMORY_S)

    def add(self, units: float, now: float) -> None:
        self.units, self.at = self.now(now) + units, now


def split(demands: Mapping[str, float], total: float = 1.0) -> dict[str, float]:
    """Shares of `total` by demand. They add up to it."""
    n, whole = len(demands), sum(demands.values())
    if whole <= 0:
        return dict.fromkeys(demands, total / n)
    return {who: total * (FLOOR / n + (1 - FLOOR) * (d / whole)) for who, d in demands.items()}


@dataclass(slots=True)
class ShareBook:
    """The shares of one router's edges."""

    edges: int  # that there should be
    _here: dict[str, dict[str, _Demand]] = field(default_factory=dict)  # by edge: by name
    _told: dict[str, float] = field(default_factory=dict)  # our demand as other routers know it
    _others: dict[str, dict[str, float]] = field(default_factory=dict)  # by router

    # -- edges

    def join(self, edge: str) -> None:
        self._here.setdefault(edge, {})

    def leave(self, edge: str) -> None:
        self._here.pop(edge, None)

    def take(self, edge: str, uses: Iterable[Use], now: float) -> dict[str, dict[str, float]]:
        """An edge's report. Returns the units to hand to other edges: by edge and name."""
        handed: dict[str, dict[str, float]] = {}
        mine = self._here.setdefault(edge, {})
        for use in uses:
            if use.wanted > 0:
                mine.setdefault(use.name, _Demand()).add(use.wanted, now)
            if use.released > 0:
                others = {e: d[use.name].now(now) for e, d in self._here.items() if e != edge and use.name in d}
                keenest = max(others, key=others.__getitem__, default=None)
                if keenest is not None and others[keenest] > FORGOTTEN:
                    handed.setdefault(keenest, {})[use.name] = use.released
        return handed

    def shares(self, now: float) -> tuple[float, dict[str, dict[str, float]]]:
        """The share of limits that nobody asks for, the same at each edge; and by edge, those of the others by name."""
        count = max(self.edges, len(self._here), 1)
        names = self._names(now)
        out: dict[str, dict[str, float]] = {edge: {} for edge in self._here}
        for name in names:
            demands = {edge: d[name].now(now) if name in d else 0.0 for edge, d in self._here.items()}
            for n in range(count - len(demands)):
                demands[f"\0{n}"] = 0.0  # one that is not here yet, or not any more: it may still give
            for edge, share in split(demands, self._of_router(name)).items():
                if edge in out:
                    out[edge][name] = share
        return 1.0 / (1 + len(self._others)) / count, out

    def _names(self, now: float) -> set[str]:
        for demands in self._here.values():
            for name in [n for n, d in demands.items() if d.now(now) < FORGOTTEN]:
                del demands[name]
        tables: list[Iterable[str]] = [*self._here.values(), self._told, *self._others.values()]
        return {name for demands in tables for name in demands}

    def _of_router(self, name: str) -> float:
        demands = {router: d.get(name, 0.0) for router, d in self._others.items()}
        demands[""] = self._told.get(name, 0.0)
        return split(demands)[""]

    # -- other routers

    def tell(self, now: float) -> list[tuple[str, float]]:
        """Our demand; from now on it counts as told."""
        sums: dict[str, float] = {}
        for demands in self._here.values():
            for name, demand in demands.items():
                sums[name] = sums.get(name, 0.0) + demand.now(now)
        most = sorted(((d, n) for n, d in sums.items() if d >= FORGOTTEN), reverse=True)[:MAX_NAMES]
        self._told = {name: demand for demand, name in most}
        return list(self._told.items())

    def hear(self, router: str, demands: Iterable[tuple[str, float]]) -> None:
        """Another router's demand; a router that is heard has its part of every limit."""
        self._others[router] = {name: d for name, d in demands if d > 0}

    def forget(self, router: str) -> None:
        """It is not there any more."""
        self._others.pop(router, None)


def differs(old: tuple[float, Mapping[str, float]] | None, new: tuple[float, Mapping[str, float]]) -> bool:
    """Whether an edge is to be told: (share of the others, shares by name)."""
    if old is None:
        return True
    names = old[1].keys() | new[1].keys()
    return abs(old[0] - new[0]) > 1e-9 or any(
        (a := old[1].get(n, old[0])) != (b := new[1].get(n, new[0])) and abs(a - b) > MATTERS * max(a, b, 1e-9) for n in names
    )
