"""The TokenizerManager: rid -> ReqState. Owns rids from a request's headers to its last message, and everything sent to the scheduler.

Every admitted choice ends exactly once: by its terminal message, by the death of a process that carried it, or by the drain's deadline.
What comes later for it is counted and ignored. One event loop; no locks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from fleet_contract.errors import CODE_ABORTED, INVALID_REQUEST, OVERLOADED, SERVER, ApiError
from fleet_contract.logs import facts
from fleet_contract.wire import RoutedHeaders
from fleet_runtime import messages as m

log = logging.getLogger(__name__)

REMEMBER_S: Final = 60.0  # an abort may overtake its request, a second abort may follow its end
_SWEEP_AT: Final = 10_000

Item = m.Text | m.Failed | m.HandedOver | m.Embedded | ApiError
"""What a request's mailbox holds. ApiError: the request as a whole is over, for a reason that is not the scheduler's word."""


class Channel(Protocol):
    """The part of Mailbox that the manager needs."""

    peers: dict[str, str]

    def send(self, peer: str, message: m.Message) -> bool: ...


@dataclass(slots=True)
class ReqState:
    """One request. `mailbox` is filled by `TokenizerManager.on_message`, emptied by the handler that waits on `event`."""

    rid: str
    routed: RoutedHeaders
    started_at: float  # CLOCK_MONOTONIC
    admitted_at: float = 0.0
    mailbox: list[Item] = field(default_factory=list)
    event: asyncio.Event = field(default_factory=asyncio.Event)
    open: set[int] = field(default_factory=set)  # admitted choices without a terminal message
    complete: set[int] = field(default_factory=set)  # of those, the ones that the scheduler was told to end well
    admitted: bool = False
    aborted: str = ""  # why, once an abort was asked for
    released: bool = False  # its handler is done with it

    def put(self, item: Item) -> None:
        """Wakes the handler."""
        self.mailbox.append(item)
        self.event.set()


class TokenizerManager:
    """See the module. `unavailable` tells why no request can be taken now, or None."""

    def __init__(self, channel: Channel, unavailable: Callable[[], ApiError | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._unavailable = unavailable
        self._clock = clock
        self._states: dict[str, ReqState] = {}
        self._finished: dict[str, float] = {}  # rid -> when it ended
        self._tombstones: dict[str, float] = {}  # rid -> when an abort for it came before it
        self.late = 0
        self.draining = False

    def __len__(self) -> int:
        """Requests whose end is not yet known or not yet written."""
        return len(self._states)

    def open(self, routed: RoutedHeaders) -> ReqState:
        """Registers a request by its rid (minted if it has none). Raises ApiError when it cannot be taken; a leg's peer is told.

        The caller must `release` the state in the end, whatever happens.
        """
        now = self._clock()
        state = ReqState(rid=routed.rid or os.urandom(16).hex(), routed=routed, started_at=now)
        if state.rid in self._states:
            raise ApiError(409, f"a request with rid {state.rid} is still open; each attempt needs a new rid", code="duplicate_rid")
        error = self._unavailable()
        if self._alive(self._tombstones, state.rid, now):
            error = _aborted("the request was aborted before it came")
        if error is not None:
            self.reject(state, error)
            raise error
        self._states[state.rid] = state
        return state

    def admit(self, state: ReqState, choices: Sequence[m.Admit]) -> None:
        """Hands choices of a checked request to the scheduler; more may follow. Raises ApiError; then nothing of these was sent."""
        if state.aborted:
            raise _aborted(state.aborted)
        error = self._unavailable()
        if error is not None:
            raise error
        state.admitted = True
        state.admitted_at = self._clock()
        for choice in choices:
            state.open.add(choice.index)
            if not self._channel.send(m.SCHEDULER, choice):
                state.put(ApiError(503, "the scheduler takes no requests; try again", type=OVERLOADED, code="scheduler_unreachable", retry_after_s=1))
                self.cancel(state, "not all choices could be sent")
                return

    async def wait(self, state: ReqState, until: float) -> list[Item]:
        """The next items, at least one; empty at `until` (CLOCK_MONOTONIC) or after an abort without admission."""
        if not state.mailbox:
            state.event.clear()
            try:
                async with asyncio.timeout(max(0.0, until - self._clock())):
                    await state.event.wait()
            except TimeoutError:
                pass
        items, state.mailbox = state.mailbox, []
        return items

    def abort(self, rid: str) -> str:
        """`POST /abort_request`: aborted, finished or unknown (then remembered)."""
        now = self._clock()
        state = self._states.get(rid)
        if state is not None and (state.open or not state.admitted):
            self.cancel(state, "aborted by the router")
            return "aborted"
        if state is not None or self._alive(self._finished, rid, now):
            return "finished"
        self._remember(self._tombstones, rid, now)
        return "unknown"

    def cancel(self, state: ReqState, reason: str) -> None:
        """Ends a request early, once. Its pages are freed by the scheduler, whose terminal messages still come."""
        if state.aborted:
            return
        state.aborted = reason
        if state.open - state.complete:
            self._channel.send(m.SCHEDULER, m.Abort(rid=state.rid, reason=reason))
        elif not state.admitted:
            state.put(_aborted(reason))

    def complete(self, state: ReqState, index: int) -> None:
        """The handler needs nothing more of this choice: the scheduler ends it, if it has not. Its terminal message still comes."""
        if index in state.open and index not in state.complete:
            state.complete.add(index)
            self._channel.send(m.SCHEDULER, m.Stopped(rid=state.rid, index=index))

    def reject(self, state: ReqState, error: ApiError) -> None:
        """A request is refused before its admission: if it is a leg, its scheduler tells the peer."""
        routed = state.routed
        if state.admitted or routed.leg is None:
            return
        self._channel.send(
            m.SCHEDULER,
            m.RoomRejected(
                rooms=list(routed.rooms),
                leg=routed.leg,
                bootstrap=routed.bootstrap or "",
                prefill_incarnation=routed.prefill_incarnation or "",
                status=error.status,
                type=error.type,
                code=error.code,
                message=error.message,
            ),
        )

    def release(self, state: ReqState) -> None:
        """The handler is done. The rid stays until the last choice's terminal message."""
        state.released = True
        state.mailbox.clear()
        self._forget_if_over(state)

    def on_message(self, message: m.Message) -> None:
        """One message of detokenizer or supervisor."""
        if isinstance(message, m.TextBatch):
            for text in message.items:
                self._deliver(text.rid, text.index, text, terminal=text.finish is not None)
        elif isinstance(message, (m.Failed, m.HandedOver, m.Embedded)):
            self._deliver(message.rid, message.index, message, terminal=True)
        elif isinstance(message, m.PeerDied):
            self.end_all(ApiError(503, message.cause, type=SERVER, code="worker_process_died", retry_after_s=1))

    def end_all(self, error: ApiError) -> None:
        """Ends every admitted request: what carried them is gone, or their time is over. An `Admit` that the scheduler has not read yet
        is followed by its `Abort`."""
        for state in list(self._states.values()):
            if state.open:
                if not state.aborted:
                    state.aborted = error.message
                    self._channel.send(m.SCHEDULER, m.Abort(rid=state.rid, reason=error.message))
                state.open.clear()
                state.put(error)
                self._forget_if_over(state)

    def end_by_deadline(self) -> None:
        """The drain's time is over."""
        for state in list(self._states.values()):
            self.cancel(state, "the worker shuts down")
        self.end_all(ApiError(503, "the worker shut down before the answer was complete", type=OVERLOADED, code="drain_deadline"))

    def check_integrity(self) -> None:
        """No state without an owner: each is held by a handler or waits for a terminal message."""
        for rid, state in self._states.items():
            assert rid == state.rid
            assert not state.released or state.open
            assert not state.open or state.admitted

    def _deliver(self, rid: str, index: int, item: Item, *, terminal: bool) -> None:
        state = self._states.get(rid)
        if state is None or index not in state.open:
            self.late += 1
            return
        if terminal:
            state.open.discard(index)
        if not state.released:
            state.put(item)
        self._forget_if_over(state)

    def _forget_if_over(self, state: ReqState) -> None:
        if state.released and not state.open and self._states.pop(state.rid, None) is not None:
            self._remember(self._finished, state.rid, self._clock())
            log.debug("request ended", extra=facts(rid=state.rid, aborted=state.aborted))

    @staticmethod
    def _alive(times: dict[str, float], rid: str, now: float) -> bool:
        return rid in times and now - times[rid] < REMEMBER_S

    @staticmethod
    def _remember(times: dict[str, float], rid: str, now: float) -> None:
        """Dicts keep their order, and time does not go back: the old ones are in front."""
        times.pop(rid, None)
        times[rid] = now
        while len(times) > _SWEEP_AT or now - next(iter(times.values())) >= REMEMBER_S:
            del times[next(iter(times))]


def _aborted(reason: str) -> ApiError:
    return ApiError(499, reason, type=INVALID_REQUEST, code=CODE_ABORTED)
