"""The rule: which worker, or which prefill and decode pair, gets a request. One sum of seconds per worker, no user-set weights.

    miss   = prompt - hit in GPU - what loading from host memory or disk saves
    wait   = pend / R                                      prompts before ours
    work   = (1 + RHO fill + BETA min(run, 20)) miss / R   our uncached tokens, what they evict, the decodes they slow down
    decode = DELTA L step                                  our answer of L tokens
    room   = L step max(0, (committed + prompt + L) / capacity - 1)

R and step are learned. DELTA is 0.3 among equal workers and rises to 1 where their speeds differ. A worker that serves alone costs
the whole sum; a pair (wait + work) of the prefill + hand-over + (decode + room) of the decode. Workers within 20 ms of the best, but
at most 10 % of it (a small model's whole cost can be less), are equal: of these, those that hold most of the prefix, then at random.

Pure functions over the columns of `load.LoadTable`; the random source is passed in. For a few workers the same sums in plain floats are
several times cheaper than in arrays: `choose` takes these for small pools without pairs, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fleet_router.decide.load import CAPACITY, COMMITTED, DISK_SPEEDUP, HOST_SPEEDUP, PENALTY, RATE, STEP, STEP_CTX, UNIT, WAIT, LoadTable

DELTA: Final = 0.3
DELTA_MIXED: Final = 1.0
EQUAL_SPEEDS: Final = 1.1  # fastest over slowest: up to here workers are equal
MIXED_SPEEDS: Final = 1.5  # from here on they differ
NEAR_TIE_S: Final = 0.020
NEAR_TIE_SHARE: Final = 0.1
BEST_PREFILLS: Final = 4  # of all pairs, those with one of these are looked at
HANDOVER_S: Final = 0.010  # of any pair: messages, and the decode's step that is under way
TRANSFER_TOKENS_PER_S: Final = 50_000.0  # between two hosts
FEW: Final = 12  # workers up to which plain floats are cheaper than arrays

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]
Draw = Callable[[int], int]  # draw(n) gives a number in [0, n)


class Ask:
    """What the request needs: tokens of the prompt, and of the answer it may get."""

    def __init__(self, prompt_tokens: int, answer_tokens: int, key_tokens: float = 0.0) -> None:
        """Args: key_tokens: the prompt's keys are of bytes: tokens that each is believed to stand for; 0: they are of tokens."""
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.key_tokens = key_tokens


class Member(NamedTuple):
    """One worker as pools see it."""

    slot: int
    name: str
    role: str
    host: str = ""
    transfer_backends: tuple[str, ...] = ()


def _slots(members: Sequence[Member]) -> Ints:
    return np.array([m.slot for m in members], np.intp)


@dataclass(frozen=True, eq=False)
class Pool:
    """Ready workers of one revision: those that serve alone, and prefill and decode workers for pairs. Made anew on every change."""

    alone: tuple[Member, ...] = ()
    prefill: tuple[Member, ...] = ()
    decode: tuple[Member, ...] = ()
    slots_alone: Ints = field(init=False)
    slots_prefill: Ints = field(init=False)
    slots_decode: Ints = field(init=False)
    slots_prompt: Ints = field(init=False)  # alone, then prefill
    few: tuple[int, ...] = field(init=False)  # slots that serve alone
    apart: Bools = field(init=False)  # [prefill, decode]: on two hosts
    pairable: Bools = field(init=False)  # [prefill, decode]: they share a transfer backend

    def __post_init__(self) -> None:
        for name, members in (("alone", self.alone), ("prefill", self.prefill), ("decode", self.decode)):
            object.__setattr__(self, f"slots_{name}", _slots(members))
        object.__setattr__(self, "slots_prompt", _slots((*self.alone, *self.prefill)))
        object.__setattr__(self, "few", tuple(m.slot for m in self.alone))
        shape = len(self.prefill), len(self.decode)
        apart = np.array([[p.host != d.host for d in self.decode] for p in self.prefill], np.bool_).reshape(shape)
        shared = [[_share_backend(p, d) for d in self.decode] for p in self.prefill]
        object.__setattr__(self, "apart", apart)
        object.__setattr__(self, "pairable", np.array(shared, np.bool_).reshape(shape))

    @property
    def is_usable(self) -> bool:
        return bool(self.alone) or bool(self.pairable.any())

    def members(self) -> tuple[Member, ...]:
        return (*self.alone, *self.prefill, *self.decode)

    def for_prompts(self) -> Pool:
        """The same for requests without an answer to decode: whoever computes prompts serves them alone."""
        return Pool((*self.alone, *self.prefill)) if self.prefill else self

    def without(self, slots: Collection[int]) -> Pool:
        """The same without some workers."""
        return Pool(*(tuple(m for m in part if m.slot not in slots) for part in (self.alone, self.prefill, self.decode)))


def _share_backend(p: Member, d: Member) -> bool:
    """Workers that name no backend leave it to their hand-shake."""
    return not p.transfer_backends or not d.transfer_backends or not set(p.transfer_backends).isdisjoint(d.transfer_backends)


class Hits:
    """Tokens of one prompt that each slot holds; index is the slot. Those of few slots are a list until somebody needs an array."""

    def __init__(self, gpu: Floats | list[float], host: Floats | None = None, disk: Floats | None = None) -> None:
        self._few: list[float] | None = gpu if isinstance(gpu, list) else None
        self._gpu: Floats | None = None if isinstance(gpu, list) else gpu
        self.host = host  # what host memory adds
        self.disk = disk

    @property
    def gpu(self) -> Floats:
        """Of all slots. Change it by `lessen` alone."""
        if self._gpu is None:
            self._gpu = np.array(self._few, np.float64)
        return self._gpu

    def values(self) -> list[float]:
        """Of all slots, in GPU memory. Read only."""
        return self._few if self._few is not None else self.gpu.tolist()

    def of(self, slot: int) -> float:
        """Of one slot, in GPU memory."""
        return self._few[slot] if self._few is not None else float(self.gpu[slot])

    def lessen(self, slot: int, tokens: float) -> None:
        """So many fewer."""
        if self._few is not None:
            self._few[slot] -= tokens
        if self._gpu is not None:
            self._gpu[slot] -= tokens

    def saved(self, slots: Ints) -> Floats:
        """Tokens that need not be computed; loading is charged at its share of computing."""
        saved = self.gpu[slots]
        if self.host is not None:
            saved = saved + self.host[slots] * (1 - 1 / HOST_SPEEDUP)
        if self.disk is not None:
            saved = saved + self.disk[slots] * (1 - 1 / DISK_SPEEDUP)
        return saved

    def saved_by(self, slot: int) -> float:
        """The same for one slot."""
        saved = self.of(slot)
        if self.host is not None:
            saved += float(self.host[slot]) * (1 - 1 / HOST_SPEEDUP)
        if self.disk is not None:
            saved += float(self.disk[slot]) * (1 - 1 / DISK_SPEEDUP)
        return saved


@dataclass(slots=True, eq=False)
class Terms:
    """The parts of the cost of each worker of one kind, all in seconds."""

    slots: Ints
    wait: Floats
    work: Floats
    decode: Floats
    room: Floats
    penalty: Floats

    @property
    def total(self) -> Floats:
        out: Floats = self.wait + self.work + self.decode + self.room + self.penalty
        return out


class FewTerms:
    """`Terms` of a small pool, computed when somebody reads them; the columns are as they were at the choice."""

    def __init__(self, slots: Ints, columns: list[tuple[float, ...]], saved: list[float], ask: Ask, weight: float) -> None:
        """Args: columns, saved: of each worker. weight: of the decode term."""
        self.slots = slots
        self.columns = columns
        self.saved = saved
        self.ask = ask
        self.weight = weight

    def as_terms(self) -> Terms:
        """Written out."""
        rows = [_few_terms(column, saved, self.ask, self.weight) for column, saved in zip(self.columns, self.saved, strict=True)]
        return Terms(self.slots, *np.array(rows).T)


def _few_terms(column: tuple[float, ...], saved: float, ask: Ask, weight: float) -> tuple[float, float, float, float, float]:
    """Wait, work, decode, room and penalty of one worker."""
    prompt, answer = ask.prompt_tokens, ask.answer_tokens
    work = column[UNIT] * max(prompt - saved, 1.0)
    steps = answer * (column[STEP] + column[STEP_CTX] * prompt)
    room = steps * max((column[COMMITTED] + (prompt + answer)) / column[CAPACITY] - 1.0, 0.0)
    return column[WAIT], work, weight * steps, room, column[PENALTY]


class Chosen:
    """One worker that serves alone, or a prefill and a decode."""

    def __init__(self, serving: int, prefill: int | None, cost_s: float) -> None:
        self.serving = serving
        self.prefill = prefill
        self.cost_s = cost_s

    @property
    def first(self) -> int:
        """Who computes the prompt."""
        return self.serving if self.prefill is None else self.prefill


def delta(table: LoadTable, slots: Ints) -> float:
    """Weight of the decode term: learned speeds that hardly differ shall not crowd the fastest worker."""
    return _delta(table.matrix[RATE, slots])


def _delta(rates: Floats) -> float:
    if rates.size < 2:
        return DELTA
    return _weight(float(rates.max() / rates.min()))


def _weight(spread: float) -> float:
    if spread <= EQUAL_SPEEDS:
        return DELTA
    share = min(1.0, max(0.0, (spread - EQUAL_SPEEDS) / (MIXED_SPEEDS - EQUAL_SPEEDS)))
    return DELTA + (DELTA_MIXED - DELTA) * share


def prefill_terms(table: LoadTable, slots: Ints, ask: Ask, hits: Hits) -> Terms:
    """Cost of the prompt on each worker."""
    m = table.matrix[:, slots]
    miss = np.maximum(ask.prompt_tokens - hits.saved(slots), 1.0)
    zero = np.zeros(slots.size)
    return Terms(slots, m[WAIT], m[UNIT] * miss, zero, zero, m[PENALTY])


def decode_terms(table: LoadTable, slots: Ints, ask: Ask) -> Terms:
    """Cost of the answer on each worker."""
    m = table.matrix[:, slots]
    decode, room = _answer_cost(m, ask, _delta(m[RATE]))
    zero = np.zeros(slots.size)
    return Terms(slots, zero, zero, decode, room, m[PENALTY])


def alone_terms(table: LoadTable, slots: Ints, ask: Ask, hits: Hits) -> Terms:
    """Cost of the whole request on each worker."""
    m = table.matrix[:, slots]
    miss = np.maximum(ask.prompt_tokens - hits.saved(slots), 1.0)
    decode, room = _answer_cost(m, ask, _delta(m[RATE]))
    return Terms(slots, m[WAIT], m[UNIT] * miss, decode, room, m[PENALTY])


def _answer_cost(m: Floats, ask: Ask, weight: float) -> tuple[Floats, Floats]:
    steps = ask.answer_tokens * (m[STEP] + m[STEP_CTX] * ask.prompt_tokens)
    over = np.maximum((m[COMMITTED] + (ask.prompt_tokens + ask.answer_tokens)) / m[CAPACITY] - 1.0, 0.0)
    return weight * steps, steps * over


def tie_limit(best: float) -> float:
    """Costs up to this count as equal to the best."""
    return best + min(NEAR_TIE_S, NEAR_TIE_SHARE * best)


def _draw_near(costs: Floats, hits: Floats, draw: Draw) -> int:
    """Position of the cheapest; among near ties the largest hit, then at random."""
    best = float(costs.min())
    near = np.flatnonzero(costs <= tie_limit(best)) if best < np.inf else np.zeros(1, np.intp)
    if near.size > 1:
        held = hits[near]
        near = near[held == held.max()]
    return int(near[0] if near.size == 1 else near[draw(near.size)])


def choose(
    table: LoadTable, pool: Pool, ask: Ask, hits: Hits, draw: Draw, open_slots: Bools | None = None
) -> tuple[Chosen, tuple[Terms, ...] | FewTerms] | None:
    """The cheapest worker or pair, and the terms it was chosen by. None when nothing in the pool can serve.

    Args:
        open_slots: by slot: who may compute the prompt; None: everybody.
    """
    if open_slots is None and 0 < len(pool.alone) <= FEW and not pool.pairable.size:
        return _choose_few(table, pool, ask, hits, draw)
    return _choose_among(table, pool, ask, hits, draw, open_slots)


def _choose_few(table: LoadTable, pool: Pool, ask: Ask, hits: Hits, draw: Draw) -> tuple[Chosen, FewTerms]:
    """`_choose_among` for a few workers that serve alone: the same sums in the same order."""
    slots = pool.few
    gpu = hits.values()
    held = [gpu[slot] for slot in slots]
    saved_of: list[float] = held if hits.host is None and hits.disk is None else hits.saved(pool.slots_alone).tolist()
    columns = [table.slots[slot].column for slot in slots]
    rates = [column[RATE] for column in columns]
    weight = _weight(max(rates) / min(rates)) if len(rates) > 1 else DELTA
    total: list[float] = []
    for n, column in enumerate(columns):
        wait, work, decode, room, penalty = _few_terms(column, saved_of[n], ask, weight)
        total.append(wait + work + decode + room + penalty)
    best = min(total)
    near = [0]
    if best < np.inf:
        limit = tie_limit(best)
        near = [n for n, cost in enumerate(total) if cost <= limit]
    if len(near) > 1:
        most = max([held[n] for n in near])
        near = [n for n in near if held[n] == most]
    at = near[0] if len(near) == 1 else near[draw(len(near))]
    return Chosen(slots[at], None, total[at]), FewTerms(pool.slots_alone, columns, saved_of, ask, weight)


def _choose_among(
    table: LoadTable, pool: Pool, ask: Ask, hits: Hits, draw: Draw, open_slots: Bools | None
) -> tuple[Chosen, tuple[Terms, ...]] | None:
    best: Chosen | None = None
    seen: list[Terms] = []
    if pool.alone:
        terms = alone_terms(table, pool.slots_alone, ask, hits)
        seen.append(terms)
        total = terms.total if open_slots is None else np.where(open_slots[terms.slots], terms.total, np.inf)
        at = _draw_near(total, hits.gpu[terms.slots], draw)
        if total[at] < np.inf:
            best = Chosen(int(terms.slots[at]), None, float(total[at]))
    if pool.pairable.size:
        p = prefill_terms(table, pool.slots_prefill, ask, hits)
        d = decode_terms(table, pool.slots_decode, ask)
        seen += (p, d)
        pair = _best_pair(pool, p, d, ask, hits, draw, open_slots)
        if pair is not None and (best is None or pair.cost_s < best.cost_s):
            best = pair
    return (best, tuple(seen)) if best is not None else None


def _best_pair(pool: Pool, p: Terms, d: Terms, ask: Ask, hits: Hits, draw: Draw, open_slots: Bools | None) -> Chosen | None:
    """All decodes with the best few prefills; all prefills where not everybody can transfer to everybody."""
    p_total, d_total = p.total, d.total
    if open_slots is not None:
        p_total = np.where(open_slots[p.slots], p_total, np.inf)
    every = bool(pool.pairable.all())
    some = np.argsort(p_total, kind="stable")[:BEST_PREFILLS] if every and p_total.size > BEST_PREFILLS else np.arange(p_total.size)
    send = np.maximum(ask.prompt_tokens - hits.gpu[d.slots], 0.0) / TRANSFER_TOKENS_PER_S
    costs = p_total[some, None] + d_total[None, :] + pool.apart[some] * send[None, :]
    if not every:
        costs = np.where(pool.pairable[some], costs, np.inf)
    if not np.isfinite(costs).any():
        return None
    held = hits.gpu[p.slots[some], None] + 1e-6 * hits.gpu[d.slots][None, :]
    at = _draw_near(costs.ravel(), held.ravel(), draw)
    row, column = divmod(at, d_total.size)
    return Chosen(int(d.slots[column]), int(p.slots[some[row]]), float(costs[row, column]) + HANDOVER_S)
