"""The rule: which worker, or which prefill and decode pair, gets a request. One sum of seconds per worker, no user-set weights.

    wait   = pend / R                                  prompts before ours
    work   = (1 + RHO fill + BETA min(run, 20)) m / R  our uncached tokens m, what they evict, the decodes they slow down
    decode = DELTA L step                              our answer of L tokens
    room   = L step max(0, (kv + prompt + L) / capacity - 1)

A unified worker costs the whole sum, a pair (wait + work) of the prefill + (decode + room) of the decode. Workers within
20 ms of the best, but at most 10 % of it (a small model's whole cost can be less), are equal: of these, those that hold most of the prefix, then
at random. Pure; the random source is passed in.
Named tuples, because they cost a third of frozen dataclasses and a choice makes several for each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fleet_contract.worker import Profile
from fleet_router.load import Load

RHO: Final = 4.0
BETA: Final = 0.1
BETA_ROWS: Final = 20
DELTA: Final = 0.3
NEAR_TIE_S: Final = 0.020
NEAR_TIE_SHARE: Final = 0.1

# Used where a worker's profile says 0.
DEFAULT_PREFILL_TOKENS_PER_S: Final = 2_000.0
DEFAULT_STEP_BASE_S: Final = 0.020


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


class Candidate(NamedTuple):
    """One worker that may take the request."""

    slot: int
    speed: Speed
    load: Load
    hit_tokens: int = 0
    penalty_s: float = 0.0


class Ask(NamedTuple):
    """What the request needs: tokens of the prompt, and of the answer it may get."""

    prompt_tokens: int
    answer_tokens: int


class Terms(NamedTuple):
    """The parts of one worker's cost, all in seconds."""

    slot: int
    hit_tokens: int
    wait: float = 0.0
    work: float = 0.0
    decode: float = 0.0
    room: float = 0.0
    penalty: float = 0.0

    @property
    def total(self) -> float:
        return self.wait + self.work + self.decode + self.room + self.penalty


def prefill_terms(c: Candidate, ask: Ask) -> Terms:
    """Cost of the prompt on a worker."""
    rate = c.speed.prefill_tokens_per_s
    load = c.load
    fill = min(1.0, load.kv_used / c.speed.kv_capacity_tokens)
    missing = max(1, ask.prompt_tokens - c.hit_tokens)
    work = (1.0 + RHO * fill + BETA * min(load.run, BETA_ROWS)) * missing / rate
    return Terms(c.slot, c.hit_tokens, load.pend / rate, work, 0.0, 0.0, c.penalty_s)


def decode_terms(c: Candidate, ask: Ask) -> Terms:
    """Cost of the answer on a worker."""
    load, speed = c.load, c.speed
    context = load.ctx + ask.prompt_tokens
    step = speed.step_base_s + speed.step_per_row_s * (load.run + 1) + speed.step_per_ctx_token_s * context
    over = (load.kv_used + ask.prompt_tokens + ask.answer_tokens) / speed.kv_capacity_tokens - 1.0
    room = ask.answer_tokens * step * over if over > 0 else 0.0
    return Terms(c.slot, c.hit_tokens, 0.0, 0.0, DELTA * ask.answer_tokens * step, room, c.penalty_s)


def unified_terms(c: Candidate, ask: Ask) -> Terms:
    """Cost of the whole request on one worker."""
    p, d = prefill_terms(c, ask), decode_terms(c, ask)
    return Terms(c.slot, c.hit_tokens, p.wait, p.work, d.decode, d.room, c.penalty_s)


def choose(terms: Sequence[Terms], draw: Callable[[int], int]) -> Terms:
    """The cheapest; among near ties the largest hit, then at random.

    Args:
        terms: at least one.
        draw: `draw(n)` gives a number in [0, n).
    """
    totals = [t.total for t in terms]
    best = min(totals)
    limit = best + min(NEAR_TIE_S, NEAR_TIE_SHARE * best)
    near = [t for t, total in zip(terms, totals, strict=True) if total <= limit]
    if len(near) > 1:
        most = max(t.hit_tokens for t in near)
        near = [t for t in near if t.hit_tokens == most]
    return near[0] if len(near) == 1 else near[draw(len(near))]


def choose_revision(weights: Sequence[tuple[str, int]], ready_units: dict[str, int], draw: Callable[[int], int]) -> str | None:
    """The revision a request goes to.

    Args:
        weights: `status.traffic`; empty when the operator wrote none.
        ready_units: for each revision with ready workers, how many pairs or unified workers.
    Returns:
        A revision of `ready_units`, drawn by weight, or by ready units where the weights name no ready revision; None without any.
    """
    shares = [(rev, weight) for rev, weight in weights if weight > 0 and ready_units.get(rev, 0) > 0]
    if not shares:
        shares = sorted((rev, n) for rev, n in ready_units.items() if n > 0)
    if not shares:
        return None
    if len(shares) == 1:
        return shares[0][0]
    at = draw(sum(weight for _, weight in shares))
    for rev, weight in shares:
        if at < weight:
            return rev
        at -= weight
    raise AssertionError("the weights do not add up")
