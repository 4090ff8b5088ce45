"""What the brain gives out: a lease on the workers chosen for one attempt, and the decision behind it in words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleet_router.decide import fleet
from fleet_router.decide.load import Pick
from fleet_router.decide.rule import Ask
from fleet_router.table import ServiceKey, Worker

if TYPE_CHECKING:
    from fleet_router.brain import Brain


@dataclass(slots=True)
class Want:
    """What a request needs of a choice."""

    service: ServiceKey
    ask: Ask
    revision: str
    keys: tuple[int, ...] = ()
    exclude: Collection[Worker] = field(default_factory=tuple)
    request_id: str = ""
    any_role: bool = False  # no generation: every ready worker can answer
    silent: bool = False  # the answer comes in one piece: nobody sees its first token
    tenant: str = ""
    klass: str = "default"
    size_bytes: int = 0


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


@dataclass(slots=True, eq=False)
class Leg:
    """One worker's part of a lease."""

    worker: Worker
    pick: Pick
    released: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """The workers chosen for one attempt, counted until `release`. Use as a context manager."""

    brain: Brain
    taken: fleet.Taken
    serving: Leg  # gives the client's answer
    prefill: Leg | None
    waited_s: float = 0.0  # because all workers were busy

    @property
    def predicted_tokens(self) -> int:
        """Of the prompt, what the worker that computes it should have cached."""
        return self.taken.predicted_tokens

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def legs(self) -> list[Leg]:
        return [self.serving] if self.prefill is None else [self.prefill, self.serving]

    def release(self) -> None:
        """Gives all counts back; again is nothing."""
        for leg in self.legs():
            self.release_leg(leg)
        self.brain.forget(self)

    def release_leg(self, leg: Leg) -> None:
        """One worker has nothing more to do for this request."""
        if not leg.released:
            leg.released = True
            self.brain.give_back(self, leg)

    def first_token(self) -> None:
        """The prompt is computed: it is no waiting work any more."""
        self.brain.first_token(self)

    def cached(self, tokens: int) -> None:
        """What the worker really had cached."""
        leg = self.prefill or self.serving
        self.brain.learn(leg.worker, self.predicted_tokens, tokens, self.taken.decision.ask.prompt_tokens)

    def answered(self, tokens: int, seconds: float) -> None:
        """The answer had so many tokens; from its first to its last byte it took so long, with a client that kept up."""
        self.serving.worker.learn_step(seconds, tokens - 1)
