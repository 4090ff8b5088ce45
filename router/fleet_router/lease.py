"""What a request wants of the deciding half, and the lease it gets: workers chosen for one attempt, counted until released."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleet_router.decide.keys import made_of
from fleet_router.table import ServiceKey, WorkerView

if TYPE_CHECKING:
    from fleet_router.desk import Desk


@dataclass(slots=True)
class Want:
    """What a request needs of a choice."""

    service: ServiceKey
    prompt_tokens: int
    answer_tokens: int
    revision: str
    keys: tuple[int, ...] = ()
    exclude: Collection[WorkerView] = field(default_factory=tuple)
    request_id: str = ""
    any_role: bool = False  # no generation: every ready worker can answer
    prompt_only: bool = False  # nothing behind the prompt is computed: a prefill worker can answer alone
    silent: bool = False  # the answer comes in one piece: nobody sees its first token
    tenant: str = ""
    klass: str = "default"
    size_bytes: int = 0
    key_tokens: float = 0.0  # keys of bytes: the tokens that each is believed to stand for; 0: keys of tokens

    @property
    def made_of(self) -> str:
        """What the keys are made of."""
        return made_of(self.keys, self.key_tokens)


@dataclass(slots=True, eq=False)
class Leg:
    """One worker's part of a lease."""

    worker: WorkerView
    pick_number: int  # of the lease's `pick_id`: the worker echoes it in its load reports
    released: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """The workers chosen for one attempt, counted until `release`. Use as a context manager."""

    desk: Desk
    number: int  # of this desk, never used again
    pick_id: str  # whose numbers the picks have: one life of a brain, or of an edge that chose without one
    serving: Leg  # gives the client's answer
    prefill: Leg | None
    prompt_tokens: int
    predicted_tokens: int  # of the prompt, what the worker that computes it should have cached
    waited_s: float = 0.0  # because all workers were busy
    over: bool = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def legs(self) -> list[Leg]:
        """Prefill first."""
        return [self.serving] if self.prefill is None else [self.prefill, self.serving]

    def release(self) -> None:
        """Gives all counts back; again is nothing."""
        for leg in self.legs():
            self.release_leg(leg)
        if not self.over:
            self.over = True
            self.desk.forget(self)

    def release_leg(self, leg: Leg) -> None:
        """One worker has nothing more to do for this request."""
        if not leg.released:
            leg.released = True
            self.desk.give_back(self, leg)

    def first_token(self) -> None:
        """The prompt is computed: it is no waiting work any more."""
        self.desk.first_token(self)

    def cached(self, tokens: int) -> None:
        """What the worker really had cached."""
        self.desk.learn_cached(self, tokens)

    def answered(self, tokens: int, seconds: float) -> None:
        """The answer had so many tokens; from its first to its last byte it took so long, with a client that kept up."""
        self.desk.learn_step(self, tokens - 1, seconds)
