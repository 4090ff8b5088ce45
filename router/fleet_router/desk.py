"""The seam between the HTTP half and the deciding half: all that an edge asks of the brain, and the lease that it gets.

A lease is workers chosen for one attempt, counted until released. `brain.Brain` is a desk itself, for an edge in its own process. All
methods that do not wait return at once and count before they return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Protocol

from fleet_contract.errors import ApiError
from fleet_router.counters import Counters
from fleet_router.decide.keys import made_of
from fleet_router.table import Service, ServiceKey, Table, WorkerView


class Want:
    """What a request needs of a choice."""

    def __init__(
        self, service: ServiceKey, prompt_tokens: int, answer_tokens: int, revision: str, keys: tuple[int, ...] = (),
        exclude: Collection[WorkerView] = (), request_id: str = "", any_role: bool = False, prompt_only: bool = False, silent: bool = False,
        tenant: str = "", klass: str = "default", size_bytes: int = 0, key_tokens: float = 0.0,
    ) -> None:  # fmt: skip
        self.service = service
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.revision = revision
        self.keys = keys
        self.exclude = exclude
        self.request_id = request_id
        self.any_role = any_role  # no generation: every ready worker can answer
        self.prompt_only = prompt_only  # nothing behind the prompt is computed: a prefill worker can answer alone
        self.silent = silent  # the answer comes in one piece: nobody sees its first token
        self.tenant = tenant
        self.klass = klass
        self.size_bytes = size_bytes
        self.key_tokens = key_tokens  # keys of bytes: the tokens that each is believed to stand for; 0: keys of tokens

    @property
    def made_of(self) -> str:
        """What the keys are made of."""
        return made_of(self.keys, self.key_tokens)


class Leg:
    """One worker's part of a lease."""

    __slots__ = ("pick_number", "released", "worker")

    def __init__(self, worker: WorkerView, pick_number: int) -> None:
        self.worker = worker
        self.pick_number = pick_number  # of the lease's `pick_id`: the worker echoes it in its load reports
        self.released = False


class ComingLease:
    """A lease that will come, None, or an error. One waits for it, and is told inside `give`; with a `loop` in that loop's next turn.

    A future of asyncio would cost each request a turn of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._then: Callable[[ComingLease], None] | None = None
        self._lease: Lease | None = None
        self._error: ApiError | None = None
        self._is_left = False
        self.done = False

    def when_done(self, then: Callable[[ComingLease], None]) -> None:
        """`then` is called once, unless nobody waits any more. It raises nothing."""
        assert self._then is None and not self.done
        self._then = then

    def give(self, lease: Lease | None) -> None:
        """It is here; None: it will not come. Where nobody waits any more it is released."""
        self._lease = lease
        if self._is_left and lease is not None:
            lease.release()
        self._end()

    def fail(self, error: ApiError) -> None:
        """In its place."""
        self._error = error
        self._end()

    def leave(self) -> None:
        """Nobody waits any more: nothing is told, and what has come and was not heard, or comes, is released."""
        heard = self.done and self._then is None
        self._then, self._is_left = None, True
        if self._lease is not None and not heard:
            self._lease.release()

    def result(self) -> Lease | None:
        """Of one that is done. Raises its error."""
        if self._error is not None:
            raise self._error
        return self._lease

    def _end(self) -> None:
        assert not self.done
        self.done = True
        if self._loop is not None:
            self._loop.call_soon(self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(self)


class Turn:
    """A request that waits for its lease. `coming` gets None when there is no ready worker any more, or an ApiError."""

    def __init__(self, coming: ComingLease) -> None:
        self.coming = coming


class Desk(Protocol):
    """See the module."""

    counters: Counters  # of this process
    draining: bool

    @property
    def table(self) -> Table[Any]:
        """The last one that the deciding half published."""

    @property
    def degraded(self) -> str:
        """Why choices are worse than they should be; empty when they are not."""

    @property
    def synced(self) -> bool:
        """Once since its start the router has known all that discovery knows."""

    def choose_revision(self, service: Service[Any], exclude: Collection[WorkerView] = ()) -> str | None:
        """A revision with ready workers, by the operator's weights; None without any."""

    def begin(self, want: Want, timeout_s: float) -> Lease | Turn | None:
        """Chooses and counts: at once when that can be, else when it is the request's turn. None when no worker is ready.

        Raises ApiError when too many wait.
        """

    def leave(self, turn: Turn) -> None:
        """Whoever waits is gone; what it may just have got is given back."""

    async def explain(self, want: Want) -> dict[str, Any] | None:
        """The decision that would be made now, in words, without making it. None when no worker is ready."""

    async def wait_change(self, service: Service[Any], timeout_s: float) -> None:
        """Waits until something in the table changed, or the time is over. Raises ApiError when too many wait."""

    def blame(self, worker: WorkerView) -> None:
        """A fault of the worker itself."""

    def suspect(self, worker: WorkerView, why: str) -> None:
        """A request found it unreachable: it is asked again before it gets another."""

    # -- of leases; called by Lease alone

    def first_token(self, lease: Lease) -> None:
        """The prompt of a lease is computed."""

    def give_back(self, lease: Lease, leg: Leg) -> None:
        """A leg is over before the others."""

    def end(self, lease: Lease, left: list[Leg]) -> None:
        """All is over, with the legs that were left. Called once, after what was learned."""

    def learn_cached(self, lease: Lease, actual: int) -> None:
        """What the worker that computed the prompt had cached, in tokens."""

    def learn_step(self, lease: Lease, steps: int, seconds: float) -> None:
        """The serving worker made so many tokens after its first in so long."""

    def praise(self, lease: Lease) -> None:
        """All its workers answered well."""


class Lease:
    """The workers chosen for one attempt, counted until `release`. Use as a context manager."""

    def __init__(
        self, desk: Desk, number: int, pick_id: str, serving: Leg, prefill: Leg | None, prompt_tokens: int, predicted_tokens: int,
        waited_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.desk = desk
        self.number = number  # of this desk, never used again
        self.pick_id = pick_id  # whose numbers the picks have: one life of a brain, or of an edge that chose without one
        self.serving = serving  # gives the client's answer
        self.prefill = prefill
        self.prompt_tokens = prompt_tokens
        self.predicted_tokens = predicted_tokens  # of the prompt, what the worker that computes it should have cached
        self.waited_s = waited_s  # because all workers were busy
        self.over = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def legs(self) -> list[Leg]:
        """Prefill first."""
        return [self.serving] if self.prefill is None else [self.prefill, self.serving]

    def release(self) -> None:
        """Gives all counts back; again is nothing."""
        if not self.over:
            self.over = True
            left = [leg for leg in self.legs() if not leg.released]
            for leg in left:
                leg.released = True
            self.desk.end(self, left)

    def release_leg(self, leg: Leg) -> None:
        """One worker has nothing more to do for this request, the other still has."""
        if not leg.released and not self.over:
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

    def praise(self) -> None:
        """Its workers answered well."""
        self.desk.praise(self)
