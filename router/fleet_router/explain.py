"""Decisions in words: what /debug/route, the dashboard and `radixfleet route explain` show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet_router.decide import fleet


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision with all its terms, for /debug/route."""

    service: str
    revision: str
    request_id: str
    decision: fleet.Decision

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
                        "worker": members[slot].name, "role": members[slot].role, "chosen": slot in chosen, "hitTokens": int(d.hits.gpu[slot]),
                        "costSeconds": sum(parts.values()), **parts,
                    }
                )  # fmt: skip
        return {
            "service": self.service,
            "revision": self.revision,
            "promptTokens": d.ask.prompt_tokens,
            "answerTokens": d.ask.answer_tokens,
            "requestId": self.request_id,
            "waitedSeconds": d.waited_s,
            "workers": workers,
        }
