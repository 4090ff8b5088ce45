"""Decisions in words: what /debug/route, the dashboard and `radixfleet route explain` show."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from msgspec import Struct

from fleet_router.decide import fleet
from fleet_router.decide.rule import tie_limit

ONLY: Final = "only one can serve"
CACHED: Final = "holds most of the prompt"
ELSEWHERE: Final = "cheaper than where the prompt is cached"
NEAR_TIE: Final = "one of several equal ones, at random"
CHEAPEST: Final = "least to do"


def reason(decision: fleet.Decision) -> tuple[str, int]:
    """Why the worker that computes the prompt was chosen: one of the words above, and how many others were as cheap. Pure."""
    first = decision.chosen.first
    terms = next(t for t in decision.terms if first in t.slots)
    total, held = terms.total, decision.hits.gpu[terms.slots]
    if terms.slots.size == 1:
        return ONLY, 0
    at = terms.slots.tolist().index(first)
    near = total <= tie_limit(float(total[at]))
    equals = int((near & (held == held[at])).sum()) - 1
    if held.max() <= 0:
        return (NEAR_TIE if equals else CHEAPEST), equals
    if held[at] < held.max():
        return ELSEWHERE, equals
    if (held < held[at]).any():
        return CACHED, equals
    return (NEAR_TIE if equals else CHEAPEST), equals


class Choice(Struct, frozen=True):
    """One decision with all its terms, for /debug/route."""

    service: str
    revision: str
    request_id: str
    keys: str  # what the prompt's keys are made of
    decision: fleet.Decision
    at: float = msgspec.field(default_factory=time.time)  # Unix time

    def as_json(self) -> dict[str, Any]:
        """What /debug/route shows."""
        d = self.decision
        members = {m.slot: m for m in d.pool.members()}
        chosen = (d.chosen.serving, d.chosen.prefill)
        workers: list[dict[str, Any]] = []
        for t in d.terms:
            for n, slot in enumerate(t.slots.tolist()):
                parts = {name: float(getattr(t, name)[n]) for name in ("wait", "work", "decode", "room", "penalty")}
                workers.append(
                    {
                        "worker": members[slot].name, "role": members[slot].role, "chosen": slot in chosen, "hitTokens": int(d.hits.of(slot)),
                        "costSeconds": sum(parts.values()), **parts,
                    }
                )  # fmt: skip
        why, equals = reason(d)
        return {
            "at": self.at,
            "reason": why,
            "equals": equals,
            "costSeconds": d.chosen.cost_s,
            "service": self.service,
            "revision": self.revision,
            "promptTokens": d.ask.prompt_tokens,
            "keys": self.keys,
            "answerTokens": d.ask.answer_tokens,
            "requestId": self.request_id,
            "waitedSeconds": d.waited_s,
            "workers": workers,
        }
