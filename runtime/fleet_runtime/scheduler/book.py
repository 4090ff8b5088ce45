"""All accepted requests, what they hold, and their terminal messages. The one place where a request begins and ends.

Called by the loop and the two legs. Whatever ends a request ends here: exactly one terminal message, its lease released (or kept aside
while a transfer may still touch its pages), its row given back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import KvMemory, Lease
from fleet_runtime.messages import Admit, Failed, HandedOver, OpenText, Sampled
from fleet_runtime.scheduler.admission import Capacity, Held, may_enter
from fleet_runtime.scheduler.request import Key, Kind, Request, State
from fleet_runtime.transfer.base import KvTransfer

TOMBSTONE_S: Final = 60.0
MAX_TOMBSTONES: Final = 10_000
PROMPT_TAIL: Final = 8  # prompt ids that the detokenizer gets, so that the first token joins them


class Outbox(Protocol):
    """To the detokenizer; never blocks."""

    def sampled(self, items: list[Sampled]) -> None: ...

    def failed(self, message: Failed) -> None: ...

    def handed_over(self, message: HandedOver) -> None: ...


@dataclass(slots=True)
class Totals:
    """Since the start of the process."""

    steps: int = 0
    prefilled_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    received_tokens: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0


@dataclass(slots=True)
class Book:
    """See the module. Every live request is in `requests` and in exactly one place by its state."""

    memory: KvMemory
    capacity: Capacity
    outbox: Outbox
    clock: Callable[[], float]
    transfer: KvTransfer | None = None
    requests: dict[Key, Request] = field(default_factory=dict)
    by_rid: dict[str, set[Key]] = field(default_factory=dict)
    plain_queue: deque[Request] = field(default_factory=deque)
    prefill_queue: deque[Request] = field(default_factory=deque)
    decode_queue: deque[Request] = field(default_factory=deque)  # decode legs that wait for a row and pages
    prefilling: list[Request] = field(default_factory=list)  # in order of admission
    decoding: list[Request] = field(default_factory=list)
    held: Held = field(default_factory=Held.nothing)
    limbo: dict[tuple[Kind, int], tuple[Lease, int]] = field(default_factory=dict)  # leases of ended requests whose room is not closed
    totals: Totals = field(default_factory=Totals)
    _items: list[Sampled] = field(default_factory=list)
    _dead_rids: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def enter(self, admit: Admit) -> Request | None:
        """Accepts a request; None for one that was answered here: a second of one (rid, index), or one whose abort came first."""
        request = Request.from_admit(admit, self.clock())
        if request.key in self.requests:
            # Not failed by name: that would end the first one's answer.
            return None
        self.requests[request.key] = request
        self.by_rid.setdefault(admit.rid, set()).add(request.key)
        if request.kind is Kind.PREFILL:
            self.held.prefill_legs += 1
        request.uncached_guess = request.prompt_tokens - self.memory.tree.peek(request.ids.tobytes(), request.prefix_limit) * PAGE_SIZE
        if self._dead_rids.get(admit.rid, 0.0) > self.clock():
            self.fail(request, aborted("the request was aborted before it arrived"))
            return None
        return request

    @property
    def waiting(self) -> int:
        """Requests that hold no row yet."""
        return len(self.requests) - self.running

    @property
    def running(self) -> int:
        """Requests that hold a row: computed, handed over, or received."""
        return sum(self.held.rows.values())

    def place(self, request: Request, state: State) -> None:
        """Moves a request to another state, and into the queue or list that goes with it."""
        self._take_out(request)
        request.state = state
        if (where := self._where(request)) is not None:
            where.append(request)

    def _where(self, request: Request) -> deque[Request] | list[Request] | None:
        match request.state:
            case State.WAITING:
                return self.prefill_queue if request.kind is Kind.PREFILL else self.plain_queue
            case State.PREALLOC:
                return self.decode_queue
            case State.PREFILLING:
                return self.prefilling
            case State.DECODING:
                return self.decoding
        return None

    def _take_out(self, request: Request) -> None:
        where = self._where(request)
        if where is not None and request in where:
            where.remove(request)

    def try_lease(self, request: Request) -> bool:
        """Gives a request its row, its cached prefix and the promise of its pages; False, and nothing changed, if that must wait."""
        if not may_enter(self.capacity, self.held, request.kind, request.total_pages):
            return False
        lease = self.memory.admit(request.ids.tobytes(), prefix_pages=request.prefix_limit, total_pages=request.total_pages)
        if lease is None:
            return False
        request.lease = lease
        self.held.rows[request.kind] += 1
        self.held.pages[request.kind] += request.total_pages
        return True

    def emit(self, request: Request, ids: list[int], finish: str | None) -> None:
        """Queues new tokens for the detokenizer; a finish ends the request."""
        opened = None
        if not request.opened:
            request.opened = True
            tail = request.ids[max(0, request.prompt_tokens - PROMPT_TAIL) : request.prompt_tokens].tolist()
            opened = OpenText(prompt_tail=tail, stop=request.admit.stop, prompt_tokens=request.prompt_tokens)
        self._items.append(
            Sampled(
                rid=request.admit.rid,
                index=request.admit.index,
                ids=ids,
                completion_tokens=request.completion_tokens,
                finish=finish,
                cached_tokens=request.cached_tokens,
                open=opened,
            )
        )
        if finish is not None:
            self.totals.finished += 1
            self.end(request)

    def flush(self) -> None:
        """Sends what `emit` queued."""
        if self._items:
            self.outbox.sampled(self._items)
            self._items = []

    def fail(self, request: Request, error: ApiError) -> None:
        """Ends a request with an error. A request that has ended stays as it is."""
        if request.state is State.ENDED:
            return
        self.flush()  # tokens before the end
        if error.code == errors.CODE_ABORTED:
            self.totals.aborted += 1
        else:
            self.totals.failed += 1
        self.outbox.failed(
            Failed(rid=request.admit.rid, index=request.admit.index, status=error.status, type=error.type, code=error.code, message=error.message)
        )
        self.end(request, error)

    def hand_over(self, request: Request) -> None:
        """Ends a prefill leg well."""
        self.totals.finished += 1
        self.outbox.handed_over(
            HandedOver(rid=request.admit.rid, index=request.admit.index, cached_tokens=request.cached_tokens, prompt_tokens=request.prompt_tokens)
        )
        self.end(request)

    def end(self, request: Request, error: ApiError | None = None) -> None:
        """Gives back all that a request holds. Its terminal message is the caller's."""
        self._take_out(request)
        request.state = State.ENDED
        del self.requests[request.key]
        keys = self.by_rid[request.admit.rid]
        keys.discard(request.key)
        if not keys:
            del self.by_rid[request.admit.rid]
        if request.kind is Kind.PREFILL:
            self.held.prefill_legs -= 1
        lease, request.lease = request.lease, None
        if lease is not None:
            self.held.rows[request.kind] -= 1
        if request.room_open:
            assert self.transfer is not None
            if lease is not None:
                self.limbo[request.kind, request_room(request)] = (lease, request.total_pages)
            reason = error if error is not None else aborted("the request ended")
            if request.kind is Kind.PREFILL:
                self.transfer.cancel(request.admit.room, reason)
            else:
                self.transfer.abandon(request.generation, reason)
        elif lease is not None:
            self._release(request.kind, lease, request.total_pages)

    def room_closed(self, kind: Kind, room: int) -> None:
        """The transfer touches this room's pages no more: frees them if their request has ended."""
        if (kept := self.limbo.pop((kind, room), None)) is not None:
            self._release(kind, *kept)

    def _release(self, kind: Kind, lease: Lease, pages: int) -> None:
        self.held.pages[kind] -= pages
        self.memory.release(lease)

    def abort(self, rid: str, reason: str) -> None:
        """Ends all choices of this exact rid, and remembers the rid so that an abort which overtakes its request still wins."""
        now = self.clock()
        while self._dead_rids and (len(self._dead_rids) >= MAX_TOMBSTONES or next(iter(self._dead_rids.values())) < now):
            self._dead_rids.popitem(last=False)
        self._dead_rids[rid] = now + TOMBSTONE_S
        self._dead_rids.move_to_end(rid)
        for key in list(self.by_rid.get(rid, ())):
            self.fail(self.requests[key], aborted(reason or "the request was aborted"))

    def leases(self) -> Iterable[Lease]:
        """All live leases, those in limbo too."""
        yield from (r.lease for r in self.requests.values() if r.lease is not None)
        yield from (lease for lease, _ in self.limbo.values())

    def check_integrity(self) -> None:
        """Every live request is where its state says, and all that is held adds up."""
        self.memory.check_integrity(self.leases())
        places = [*self.plain_queue, *self.prefill_queue, *self.decode_queue, *self.prefilling, *self.decoding]
        assert len({r.key for r in places}) == len(places), "a request is in two places"
        for request in self.requests.values():
            assert request.state is not State.ENDED
            where = self._where(request)
            assert where is None or request in where
            assert request.lease is None or request.computed <= request.lease.count * PAGE_SIZE
        assert all(r.key in self.requests for r in places)
        rows, pages = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
        for request in self.requests.values():
            if request.lease is not None:
                rows[request.kind] += 1
                pages[request.kind] += request.total_pages
        for (kind, _), (_, n) in self.limbo.items():
            pages[kind] += n
        assert rows == self.held.rows and pages == self.held.pages
        assert self.held.prefill_legs == sum(r.kind is Kind.PREFILL for r in self.requests.values())


def request_room(request: Request) -> int:
    """The name of its room in the transfer: a decode leg's generation, a prefill leg's room."""
    return request.admit.room if request.kind is Kind.PREFILL else request.generation


def aborted(message: str) -> ApiError:
    """The error of a request that somebody ended; derived, the router prefers another leg's cause."""
    return ApiError(499, message, type=errors.INVALID_REQUEST, code=errors.CODE_ABORTED)
