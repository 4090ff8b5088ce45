"""What each worker has to do now, in numbers that a choice can use at once.

Per worker: our own picks in flight joined with its load reports. A report says by `seen` which picks it already holds, so a pick
is counted once: by the report when seen, else by us. No clocks of two machines are compared. Every change updates the sums and the
worker's column of one matrix, so that a choice among a thousand workers is a few array operations. Picks of other routers (`peers`)
are joined in the same way. A pick that these cannot know yet counts once for each router: all of them may be making the same choice.

Speeds start from the worker's own profile and are learned, bounded to 0.25x-4x of it. Clock-free: `now` is passed and never falls.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fleet_contract.worker import LoadReport, Profile, Seen
from fleet_router.decide.told import Prefix

RHO: Final = 4.0  # what a miss evicts, where the cache is full
BETA: Final = 0.1  # what it costs each running decode
BETA_ROWS: Final = 20
REPORT_LIFE_S: Final = 3.0  # a report older than this is not truth any more
LEARN_LIMIT: Final = 4.0
LEARN_S: Final = 10.0  # seconds of work that the profile counts for
LEARN_LIFE_S: Final = 60.0  # seconds of work that are remembered
LEARN_TOKENS: Final = 256  # shorter prompts are mostly overhead
SILENT_FACTOR: Final = 1.5  # a prompt whose first token nobody will see counts as computed after so many times its expected time

# Used where a worker's profile says 0.
DEFAULT_PREFILL_TOKENS_PER_S: Final = 2_000.0
DEFAULT_STEP_BASE_S: Final = 0.020
# Loading a cached token from a slower tier, in multiples of computing it.
HOST_SPEEDUP: Final = 10.0
DISK_SPEEDUP: Final = 3.0

OURS: Final = ""  # as the name of a router

# Rows of the matrix.
WAIT, UNIT, STEP, STEP_CTX, COMMITTED, CAPACITY, PENALTY, ROWS, RATE = range(9)
NUM_ROWS: Final = 9


@dataclass(frozen=True, slots=True)
class Speed:
    """What a worker can do, from its record."""

    prefill_tokens_per_s: float
    step_base_s: float
    step_per_row_s: float
    step_per_ctx_token_s: float
    kv_capacity_tokens: int

    @classmethod
    def of(cls, profile: Profile, kv_capacity_tokens: int) -> Speed:
        """Fills what the profile leaves open."""
        return cls(
            profile.prefill_tokens_per_s if profile.prefill_tokens_per_s > 0 else DEFAULT_PREFILL_TOKENS_PER_S,
            profile.step_base_s if profile.step_base_s > 0 else DEFAULT_STEP_BASE_S,
            max(0.0, profile.step_per_row_s),
            max(0.0, profile.step_per_ctx_token_s),
            max(1, kv_capacity_tokens),
        )


class Pick:
    """One request of ours on one worker, from the choice to its end."""

    __slots__ = ("at", "key_tokens", "number", "ours", "pend_tokens", "prefix", "prompt_tokens", "room_tokens", "started")

    def __init__(
        self, number: int, pend_tokens: int, prompt_tokens: int, room_tokens: int, at: float = 0.0, started: bool = False, ours: bool = True
    ) -> None:
        self.number = number  # below 0: adopted
        self.pend_tokens = pend_tokens  # uncached prompt tokens
        self.prompt_tokens = prompt_tokens  # of context, once it runs; 0 on a worker that only computes the prompt
        self.room_tokens = room_tokens  # prompt and expected answer
        self.at = at
        self.started = started  # its first token came: the prompt is no work any more
        self.ours = ours  # counted by us, not by a report
        self.prefix: Prefix = ()  # of its prompt, for other routers
        self.key_tokens = 0.0  # of these keys, see `rule.Ask`


class Load(NamedTuple):
    """Tokens and rows."""

    pend: int = 0  # uncached prompt tokens that wait or are computed
    run: int = 0  # rows that decode
    rows: int = 0  # those, and the requests that will
    ctx: int = 0  # tokens of context of the running rows
    committed: int = 0  # tokens of all requests, with the answers we expect


@dataclass(slots=True)
class Learned:
    """A speed as seen, against what the profile says: weighted means of work over time."""

    expected_s: float = LEARN_S
    seen_s: float = LEARN_S

    @property
    def factor(self) -> float:
        """How many times faster than the profile, within the limits."""
        return _within(self.expected_s / self.seen_s)

    def add(self, expected_s: float, seen_s: float) -> None:
        """One piece of work: what the profile expects of it, and what it took."""
        keep = max(0.0, 1.0 - max(expected_s, seen_s) / LEARN_LIFE_S)
        self.expected_s = self.expected_s * keep + expected_s
        self.seen_s = self.seen_s * keep + max(0.0, seen_s)


def _within(factor: float) -> float:
    return min(LEARN_LIMIT, max(1 / LEARN_LIMIT, factor))


class LoadTable:
    """The matrix: one column per slot."""

    def __init__(self) -> None:
        self.width = 8  # slots that the matrix has room for; a number, since every choice reads it
        self._matrix: npt.NDArray[np.float64] = np.ones((NUM_ROWS, self.width))
        self._changed: set[SlotLoad] = set()  # columns that are not written yet
        self.slots: dict[int, SlotLoad] = {}
        self.version = 0  # of speeds
        self._next_expiry = math.inf  # no report gets too old before
        self._silent: list[tuple[float, int, SlotLoad, Pick]] = []
        self._silent_number = 0
        self.routers = 1  # that choose among these workers, with this one
        self.shared = False  # changes are kept in `unsent` until `take_unsent`
        self.on_unsent: Callable[[], None] = lambda: None  # there is something again
        self._unsent: set[SlotLoad] = set()

    @property
    def matrix(self) -> npt.NDArray[np.float64]:
        """One column per slot, as they are now. Read, never kept."""
        for load in self._changed:
            if load.slot >= 0:
                self._matrix[:, load.slot] = load.column
        self._changed.clear()
        return self._matrix

    def changed(self, load: SlotLoad) -> None:
        """A column is to be written before the matrix is read."""
        self._changed.add(load)

    def add(self, slot: int, speed: Speed, *, learn: bool = True) -> SlotLoad:
        """A worker without load."""
        assert slot not in self.slots, slot
        while slot >= self.width:
            self._matrix = np.concatenate([self._matrix, np.ones_like(self._matrix)], axis=1)
            self.width *= 2
        load = self.slots[slot] = SlotLoad(self, slot, speed, learn=learn)
        load.refresh()
        return load

    def remove(self, slot: int) -> None:
        """The column is free; what the worker still runs may be given back later."""
        self.slots.pop(slot).slot = -1

    def set_routers(self, routers: int) -> None:
        """So many share the work from now on."""
        if routers != self.routers:
            self.routers = routers
            for load in self.slots.values():
                load.refresh()

    def note_unsent(self, load: SlotLoad, number: int) -> None:
        """A pick of ours is new, has started or is over."""
        if self.shared:
            load.unsent.add(number)
            self._unsent.add(load)
            if len(self._unsent) == 1:
                self.on_unsent()

    def take_unsent(self) -> list[tuple[SlotLoad, list[int]]]:
        """The picks that changed since the last call, by worker: other routers are told of them now."""
        out = [(load, sorted(load.unsent)) for load in self._unsent]
        for load in self._unsent:
            load.unsent.clear()
            load.refresh()
        self._unsent.clear()
        return out

    def tick(self, now: float) -> None:
        """Drops reports that are too old, and counts silent prompts as computed. Called before a choice; nearly always nothing to do."""
        if now >= self._next_expiry:
            self._next_expiry = math.inf
            for load in self.slots.values():
                if load.report is not None:
                    if now - load.report_at > REPORT_LIFE_S:
                        load.drop_report()
                    else:
                        self._next_expiry = min(self._next_expiry, load.report_at + REPORT_LIFE_S)
        while self._silent and self._silent[0][0] <= now:
            _, _, load, pick = heapq.heappop(self._silent)
            if pick.number in load.picks and not pick.started:
                load.start(pick, now, seen=False)

    def report_expires(self, at: float) -> None:
        """A report of some worker is truth until then."""
        self._next_expiry = min(self._next_expiry, at)

    def watch_silent(self, load: SlotLoad, pick: Pick, now: float) -> None:
        """Nobody will see this pick's first token: it counts as computed when its expected time is over."""
        due = now + SILENT_FACTOR * (load.pend / load.prefill_rate + load.speed.step_base_s)
        self._silent_number += 1
        heapq.heappush(self._silent, (due, self._silent_number, load, pick))

    def check_integrity(self) -> None:
        """Raises AssertionError when a sum or a column is not what the picks and reports say."""
        assert self.width == self._matrix.shape[1]
        for slot, load in self.slots.items():
            assert load.slot == slot
            assert load.now() == load.recount(), slot
            assert all(load.others.values()) and (not load.unsent or load in self._unsent), slot
            column = self.matrix[:, slot].copy()
            load.refresh()
            assert np.allclose(column, self.matrix[:, slot], rtol=1e-12, atol=0), slot
            assert np.array_equal(self.matrix[:, slot], load.column), slot


@dataclass(slots=True, eq=False)
class SlotLoad:
    """Load and speed of one worker incarnation. Pick numbers count from 0: the worker's `seen` can then close its gaps."""

    table: LoadTable
    slot: int  # -1: removed
    speed: Speed
    learn: bool = True
    picks: dict[int, Pick] = field(default_factory=dict)
    others: dict[str, dict[int, Pick]] = field(default_factory=dict)  # those of other routers, by the name that reports call them
    unsent: set[int] = field(default_factory=set)  # numbers of our picks whose state other routers do not know
    next_number: int = 0
    next_adopted: int = -1
    report: LoadReport | None = None
    report_at: float = 0.0
    pend: int = 0
    run: int = 0
    rows: int = 0
    ctx: int = 0
    committed: int = 0
    cached_tokens: int = 0  # in its cache, as the index knows
    penalty_s: float = 0.0
    prefill: Learned = field(default_factory=Learned)
    step: Learned = field(default_factory=Learned)
    speeds: dict[str, tuple[float, float]] = field(default_factory=dict)  # factors of prefill and step as routers told them last, ours by OURS
    _factors: tuple[float, float] | None = None  # the mean of those, where there are others
    _last_start: float = -math.inf
    _column: tuple[float, ...] | None = None

    # -- speed of others

    @property
    def seen_s(self) -> float:
        """Seconds of work that its speed was learned from, with what the profile counts for."""
        return self.prefill.seen_s + self.step.seen_s

    def begin_as(self, other: SlotLoad) -> None:
        """It is another worker of the same kind: what was learned of that one counts as its profile does."""
        for mine, its in ((self.prefill, other.prefill), (self.step, other.step)):
            mine.seen_s = mine.expected_s / its.factor
        self.table.version += 1
        self.refresh()

    # -- requests

    def pick(self, pend_tokens: int, prompt_tokens: int, room_tokens: int, now: float) -> Pick:
        """Counts a request, at the choice and before anything is awaited."""
        pick = Pick(self.next_number, pend_tokens, prompt_tokens, room_tokens, now)
        self.next_number += 1
        self.picks[pick.number] = pick
        self._count(pick, 1)
        self._changed(pick)
        return pick

    def adopt(self, pend_tokens: int, prompt_tokens: int, room_tokens: int, now: float, *, started: bool) -> Pick:
        """Counts a request that runs there already and was picked under another name: every report of the worker holds it."""
        pick = Pick(self.next_adopted, pend_tokens, prompt_tokens, room_tokens, now, started, ours=self.report is None)
        self.next_adopted -= 1
        self.picks[pick.number] = pick
        if pick.ours:
            self._count(pick, 1)
        self._changed(pick)
        return pick

    def start(self, pick: Pick, now: float, *, seen: bool = True) -> None:
        """Its first token came (`seen`), or should have. Again is nothing."""
        if pick.started or pick.number not in self.picks:
            return
        if seen:
            self._learn_prefill(pick, now)
        if pick.ours:
            self._count(pick, -1)
        pick.started = True
        if pick.ours:
            self._count(pick, 1)
        self._changed(pick)

    def release(self, pick: Pick) -> None:
        """The request is over. Releasing twice changes nothing."""
        if self.picks.pop(pick.number, None) is not None:
            if pick.ours:
                self._count(pick, -1)
            self._changed(pick)

    # -- requests of other routers

    def set_other(self, router: str, told: Pick, now: float) -> None:
        """A pick of another router is so. Again is nothing."""
        known = self.others.setdefault(router, {}).get(told.number)
        if known is not None:
            if (known.pend_tokens, known.prompt_tokens, known.room_tokens, known.started) == (
                told.pend_tokens, told.prompt_tokens, told.room_tokens, told.started,
            ):  # fmt: skip
                return
            if known.ours:
                self._count(known, -1)
            if told.started and not known.started:
                self._learn_prefill(known, now)  # else what it took looks as if our prompts had taken it
        told.ours = self._is_unseen(told.number, self.report.seen.get(router) if self.report is not None else None)
        self.others[router][told.number] = told
        if told.ours:
            self._count(told, 1)
        self.refresh()

    def end_other(self, router: str, number: int) -> None:
        """A pick of another router is over. Again is nothing."""
        picks = self.others.get(router, {})
        pick = picks.pop(number, None)
        if pick is not None:
            if not picks:
                del self.others[router]
            if pick.ours:
                self._count(pick, -1)
            self.refresh()

    def forget_others(self, router: str) -> None:
        """Nothing is known of another router any more: what it has here is for the worker's reports to tell."""
        for number in list(self.others.get(router, ())):
            self.end_other(router, number)

    def tell_speeds(self) -> tuple[float, float]:
        """What we learned of it, for other routers; from now on that is our part of the mean."""
        told = (self.prefill.factor, self.step.factor)
        self.set_speeds(OURS, told)
        return told

    def set_speeds(self, router: str, factors: tuple[float, float] | None) -> None:
        """What a router learned; None: it is not heard any more. All routers reckon with the same mean: else each judges queues differently."""
        if self.speeds.get(router) == factors:
            return
        if factors is None:
            del self.speeds[router]
        else:
            self.speeds[router] = factors
        n = len(self.speeds)
        if self.speeds.keys() - {OURS}:
            prefill, step = (math.prod(_within(f[at]) for f in self.speeds.values()) ** (1 / n) for at in (0, 1))
            self._factors = prefill, step
        else:
            self._factors = None
        self.table.version += 1
        self.refresh()

    # -- reports

    def take_report(self, report: LoadReport, router_id: str, now: float) -> None:
        """A newer report; one with an older sequence number is ignored."""
        if self.report is not None and report.seq <= self.report.seq:
            return
        self.report, self.report_at = report, now
        seen: Seen | None = report.seen.get(router_id)
        for number, pick in self.picks.items():
            pick.ours = self._is_unseen(number, seen)
        for router, picks in self.others.items():
            seen = report.seen.get(router)
            for number, pick in picks.items():
                pick.ours = self._is_unseen(number, seen)
        self._set(self.recount())
        self.table.report_expires(now + REPORT_LIFE_S)

    def drop_report(self) -> None:
        """The report is too old: all picks are counted by us."""
        self.report = None
        for pick in self.all_picks():
            pick.ours = True
        self._set(self.recount())

    def _is_unseen(self, number: int, seen: Seen | None) -> bool:
        """Whether the last report does not hold a pick yet. Args: seen: what it says of the router whose pick it is."""
        if self.report is None:
            return True
        return number >= 0 and (seen is None or number > seen.up_to or number in seen.missing)

    def all_picks(self) -> Iterator[Pick]:
        """Ours and those of other routers."""
        return chain(self.picks.values(), *(picks.values() for picks in self.others.values()))

    # -- numbers

    def now(self) -> Load:
        """The sums."""
        return Load(self.pend, self.run, self.rows, self.ctx, self.committed)

    def recount(self) -> Load:
        """The sums, from scratch."""
        report = self.report
        pend = run = rows = ctx = committed = 0
        if report is not None:
            pend, run, rows, ctx, committed = report.pend, report.run, report.run, report.ctx, report.ctx + report.pend
        for pick in self.all_picks():
            if pick.ours:
                committed += pick.room_tokens
                decodes = pick.prompt_tokens > 0
                rows += decodes
                if pick.started:
                    run += decodes
                    ctx += pick.prompt_tokens
                else:
                    pend += pick.pend_tokens
        return Load(pend, run, rows, ctx, committed)

    @property
    def prefill_rate(self) -> float:
        """Uncached prompt tokens per second, as learned."""
        return self.speed.prefill_tokens_per_s * (self.prefill.factor if self._factors is None else self._factors[0])

    @property
    def fill(self) -> float:
        """Share of the KV cache that is in use, by requests or by cached prefixes."""
        used = self.cached_tokens
        if self.report is not None:
            used = max(used, self.report.kv_used)
        return min(1.0, max(used, self.committed) / self.speed.kv_capacity_tokens)

    def set_penalty(self, seconds: float) -> None:
        """After faults: how much dearer it is than it looks."""
        self.penalty_s = seconds
        self.refresh()

    def set_cached(self, tokens: int) -> None:
        """What the index knows of its cache."""
        self.cached_tokens = tokens
        self.refresh()

    def learn_step(self, seconds: float, tokens: int) -> None:
        """An answer of this worker took `seconds` for `tokens` tokens after its first."""
        if self.learn and tokens > 0 and seconds > 0:
            expected = self.speed.step_base_s + self.speed.step_per_row_s * max(1, self.rows) + self.speed.step_per_ctx_token_s * self.ctx
            share = 1 / max(1, len(self.picks))  # rows of ours that run side by side tell of the same steps
            self.step.add(expected * tokens * share, seconds * share)
            self.table.version += 1
            self.refresh()

    def refresh(self) -> None:
        """Something changed: the column is computed anew when it is asked for."""
        self._column = None
        self.table.changed(self)

    @property
    def column(self) -> tuple[float, ...]:
        """This worker in the rows of the matrix."""
        if self._column is None:
            speed, rate = self.speed, self.prefill_rate
            pend = self.pend + (self.table.routers - 1) * self._fresh() if self.unsent else self.pend
            slowness = 1 / (self.step.factor if self._factors is None else self._factors[1])
            self._column = (
                pend / rate,
                (1.0 + RHO * self.fill + BETA * min(self.run, BETA_ROWS)) / rate,
                (speed.step_base_s + speed.step_per_row_s * (self.rows + 1) + speed.step_per_ctx_token_s * self.ctx) * slowness,
                speed.step_per_ctx_token_s * slowness,
                float(self.committed),
                float(speed.kv_capacity_tokens),
                self.penalty_s,
                float(self.rows),
                rate,
            )
        return self._column

    def _fresh(self) -> int:
        """Prompt tokens that only we know of."""
        picks = [self.picks[n] for n in self.unsent if n in self.picks]
        return sum(p.pend_tokens for p in picks if p.ours and not p.started)

    def _changed(self, pick: Pick) -> None:
        """Of one of our picks."""
        self.table.note_unsent(self, pick.number)
        self.refresh()

    def _learn_prefill(self, pick: Pick, now: float) -> None:
        """Prompts are computed one after another: since the pick, or since the last first token if that came later."""
        began = max(pick.at, self._last_start)
        self._last_start = now
        if self.learn and pick.pend_tokens >= LEARN_TOKENS:
            self.prefill.add(pick.pend_tokens / self.speed.prefill_tokens_per_s, now - began)
            self.table.version += 1

    def _count(self, pick: Pick, sign: int) -> None:
        decodes = sign if pick.prompt_tokens > 0 else 0
        self.committed += sign * pick.room_tokens
        self.rows += decodes
        if pick.started:
            self.run += decodes
            self.ctx += sign * pick.prompt_tokens
        else:
            self.pend += sign * pick.pend_tokens

    def _set(self, load: Load) -> None:
        self.pend, self.run, self.rows, self.ctx, self.committed = load
        self.refresh()
