"""All accepted requests, what they hold, and their terminal messages. The one place where a request begins and ends.

Called by the loop and the two legs. Whatever ends a request ends here: exactly one terminal message, its lease released (or kept aside
while a transfer may still touch its pages), its row given back.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import KvMemory, Lease, pages_for
from fleet_runtime.messages import Admit, ControlReply, Embedded, Failed, HandedOver, OpenText, Sampled, TokenLogprob
from fleet_runtime.scheduler.admission import Capacity, Held, lets_pass, may_enter
from fleet_runtime.scheduler.grammar import DeadEnd, GrammarFault, Grammars, TooHard
from fleet_runtime.scheduler.ratio import NewTokenRatio
from fleet_runtime.scheduler.request import Key, Kind, Request, State
from fleet_runtime.scheduler.rows import Rows
from fleet_runtime.scheduler.sampling import counts_for
from fleet_runtime.transfer.base import KvTransfer

log = logging.getLogger(__name__)
TOMBSTONE_S: Final = 60.0
MAX_TOMBSTONES: Final = 10_000
PROMPT_TAIL: Final = 8  # prompt ids that the detokenizer gets, so that the first token joins them


class Outbox(Protocol):
    """To the detokenizer; never blocks."""

    def sampled(self, items: list[Sampled]) -> None: ...

    def failed(self, message: Failed) -> None: ...

    def handed_over(self, message: HandedOver) -> None: ...

    def embedded(self, message: Embedded) -> None: ...

    def control_reply(self, message: ControlReply) -> None: ...


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
    retractions: int = 0
    grammar_rows: int = 0
    wasted_tokens: int = 0  # drawn for rows whose request had ended meanwhile
    self_check_failures: int = 0


@dataclass(slots=True)
class Book:
    """See the module. Every live request is in `requests` and in exactly one place by its state."""

    memory: KvMemory
    capacity: Capacity
    outbox: Outbox
    clock: Callable[[], float]
    rows: Rows
    ratio: NewTokenRatio
    grammars: Grammars
    transfer: KvTransfer | None = None
    requests: dict[Key, Request] = field(default_factory=dict)
    by_rid: dict[str, set[Key]] = field(default_factory=dict)
    plain_queue: deque[Request] = field(default_factory=deque)
    prefill_queue: deque[Request] = field(default_factory=deque)
    decode_queue: deque[Request] = field(default_factory=deque)  # decode legs that wait for a row and pages
    prefilling: list[Request] = field(default_factory=list)  # in order of admission
    decoding: list[Request] = field(default_factory=list)
    held: Held = field(default_factory=Held.nothing)
    limbo: set[Request] = field(default_factory=set)  # ended, but with a lease: their room is not closed
    elder: Request | None = None  # the plain request that has waited too long to be passed by a younger leg; set before each choice
    moved: int = 0  # how often a request changed its place, ended, or gave pages back
    totals: Totals = field(default_factory=Totals)
    _items: list[Sampled] = field(default_factory=list)
    _serial: int = 0  # of the request that came last
    _dead_rids: OrderedDict[str, float] = field(default_factory=OrderedDict)  # aborted before they came, until when
    _past_rids: OrderedDict[str, float] = field(default_factory=OrderedDict)  # ended, until when

    def enter(self, admit: Admit) -> Request | None:
        """Accepts a request; None for one that was answered here: a second of one (rid, index), or one whose abort came first."""
        request = Request.from_admit(admit, self.clock())
        if request.key in self.requests:
            # Not failed by name: that would end the first one's answer.
            return None
        self._serial += 1
        request.serial = self._serial
        self.requests[request.key] = request
        self.by_rid.setdefault(admit.rid, set()).add(request.key)
        if request.kind is Kind.PREFILL:
            self.held.prefill_legs += 1
        request.counts = counts_for(admit, request.ids[: request.prompt_tokens])
        self.guess(request)
        if self._dead_rids.get(admit.rid, 0.0) > self.clock():
            self.refuse(request, aborted("the request was aborted before it arrived"))
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

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of those requests."""
        return sum(r.prompt_tokens for r in self.requests.values() if r.lease is None)

    def guess(self, request: Request) -> None:
        """Looks up how many tokens of a waiting request are not cached now."""
        key = request.ids[: request.length].tobytes()
        request.uncached_guess = request.target - self.memory.peek(key, request.prefix_limit, request.namespace) * PAGE_SIZE

    def place(self, request: Request, state: State) -> None:
        """Moves a request to another state, and to the end of the queue or list that goes with it; one that was retracted to the front."""
        self._take_out(request)
        self.moved += 1
        request.state = state
        where = self._where(request)
        if isinstance(where, deque) and request.retractions:
            where.appendleft(request)
        elif where is not None:
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
        """Gives a request its row, its cached prefix and the promise of pages; False, and nothing changed, if that must wait.

        Legs are promised all that they may ever need: they are never retracted. So is everybody where the ratio is 1. Else a request is
        promised the pages of what it has, and what it and the others will probably need besides must be there, if others run.
        """
        elder = self.elder
        younger = elder is not None and elder.state is State.WAITING and request.arrived > elder.arrived
        if elder is not None and younger and lets_pass(self.capacity, self.held, request.kind, elder.total_pages):
            return False
        if not may_enter(self.capacity, self.held, request.kind, request.total_pages, elder=request is elder):
            return False
        promise, reserve = request.total_pages, 0
        if not self.ratio.promises_all:
            running = [r for r in (*self.prefilling, *self.decoding) if r.kind is Kind.PLAIN]
            reserve = self.ratio.reserved(running)
            if request.kind is Kind.PLAIN:
                promise = min(request.total_pages, pages_for(request.target + 1))
                reserve += max(0, self.ratio.wanted_pages(request) - promise) if running else 0
        lease = self.memory.admit(
            request.ids[: request.length].tobytes(),
            prefix_pages=request.prefix_limit,
            total_pages=request.total_pages,
            promise=promise,
            reserve=reserve,
            namespace=request.namespace,
            priority=request.admit.priority,
        )
        if lease is None:
            return False
        request.lease = lease
        request.computed = request.launched = lease.shared * PAGE_SIZE
        self.rows.take(request)
        request.started = request.started or self.clock()
        self.held.rows[request.kind] += 1
        self.held.pages[request.kind] += request.total_pages
        return True

    def retract(self, request: Request) -> None:
        """Takes a request's pages and row back; it waits again, with what it has answered so far as part of its prompt."""
        assert request.kind is Kind.PLAIN and request.drawing == 0 and request.lease is not None
        self.totals.retractions += 1
        request.retractions += 1
        lease, request.lease = request.lease, None
        self._give_row(request)
        self._release(request, lease)
        request.target, request.computed, request.launched = request.length, 0, 0
        request.pooled = None
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = []
        self.guess(request)
        self.place(request, State.WAITING)

    def _give_row(self, request: Request) -> None:
        self.rows.give(request)
        self.held.rows[request.kind] -= 1

    def emit(self, request: Request, ids: list[int], finish: str | None, *, logprobs: list[TokenLogprob] | None = None, stop_id: int = -1) -> None:
        """Queues new tokens for the detokenizer; a finish ends the request."""
        admit, opened, prompt_logprobs = request.admit, None, None
        if request.opened and finish is None and logprobs is None:  # what most are
            self._items.append(Sampled(admit.rid, admit.index, ids, request.completion_tokens, None, request.cached_tokens))
            return
        queued_s = prefill_s = 0.0
        if not request.opened:
            request.opened = True
            tail = request.ids[max(0, request.prompt_tokens - PROMPT_TAIL) : request.prompt_tokens].tolist()
            opened = OpenText(
                prompt_tail=tail,
                stop=admit.stop,
                prompt_tokens=request.prompt_tokens,
                min_tokens=admit.min_tokens,
                include_stop=admit.include_stop,
                keep_special=admit.keep_special,
                spaces_between_special=admit.spaces_between_special,
                serial=request.serial,
            )
            prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
            queued_s, prefill_s = max(0.0, request.started - request.arrived), max(0.0, self.clock() - request.started)
        self._items.append(
            Sampled(
                rid=admit.rid,
                index=admit.index,
                ids=ids,
                completion_tokens=request.completion_tokens,
                finish=finish,
                cached_tokens=request.cached_tokens,
                open=opened,
                logprobs=logprobs or [],
                prompt_logprobs=prompt_logprobs,
                stop_id=stop_id,
                queued_s=queued_s,
                prefill_s=prefill_s,
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

    def refuse(self, request: Request, error: ApiError) -> None:
        """Fails a request at entry."""
        told = request.state is State.COMPILING
        self.fail(request, error)
        if not told:
            self._tell_other_leg(request, error)

    def _tell_other_leg(self, request: Request, error: ApiError) -> None:
        """A leg has ended before the transfer knew of its room: the other leg of the pair must hear of it, or it would wait."""
        admit = request.admit
        if self.transfer is not None and request.kind is not Kind.PLAIN and 0 < admit.room < 2**63:
            self.transfer.reject(admit.room, admit.leg, admit.bootstrap, admit.prefill_incarnation, error)

    def embed(self, request: Request, vector: bytes) -> None:
        """Ends an embedding well."""
        self.flush()  # what was said before goes before
        self.totals.finished += 1
        self.outbox.embedded(
            Embedded(
                rid=request.admit.rid,
                index=request.admit.index,
                vector=vector,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens,
            )
        )
        self.end(request)

    def hand_over(self, request: Request) -> None:
        """Ends a prefill leg well."""
        self.flush()
        self.totals.finished += 1
        self.outbox.handed_over(
            HandedOver(rid=request.admit.rid, index=request.admit.index, cached_tokens=request.cached_tokens, prompt_tokens=request.prompt_tokens)
        )
        self.end(request)

    def end(self, request: Request, error: ApiError | None = None) -> None:
        """Gives back all that a request holds. Its terminal message is the caller's."""
        self._take_out(request)
        self.moved += 1
        if request.state is State.COMPILING:
            self.grammars.drop(request)
            if error is not None:
                self._tell_other_leg(request, error)
        request.state = State.ENDED
        request.grammar = request.counts = None
        del self.requests[request.key]
        keys = self.by_rid[request.admit.rid]
        keys.discard(request.key)
        if not keys:
            del self.by_rid[request.admit.rid]
            self._past_rids[request.admit.rid] = self.clock() + TOMBSTONE_S
            self._past_rids.move_to_end(request.admit.rid)
            if len(self._past_rids) > MAX_TOMBSTONES:
                self._past_rids.popitem(last=False)
        if request.kind is Kind.PREFILL:
            self.held.prefill_legs -= 1
        if request.lease is not None:
            self._give_row(request)
            self.limbo.add(request)
        if request.room_open:
            assert self.transfer is not None
            reason = error if error is not None else aborted("the request ended")
            if request.kind is Kind.PREFILL:
                self.transfer.cancel(request.admit.room, reason)
            else:
                self.transfer.abandon(request.generation, reason)
        self.settle(request)

    def settle(self, request: Request) -> None:
        """Frees the pages of a request that has ended, unless the transfer may still touch them. Called when its room closes, too."""
        if request in self.limbo and not request.room_open:
            self.limbo.remove(request)
            lease, request.lease = request.lease, None
            assert lease is not None
            self._release(request, lease)

    def _release(self, request: Request, lease: Lease) -> None:
        self.moved += 1
        self.held.pages[request.kind] -= request.total_pages
        self.memory.release(lease)

    def abort(self, rid: str, reason: str) -> None:
        """Ends all choices of this exact rid. One that was never here is remembered, so that an abort which overtakes its request still wins; one
        that has ended is not, so that its id may be used again."""
        if not rid:
            return
        now = self.clock()
        _forget(self._dead_rids, now)
        _forget(self._past_rids, now)
        if rid not in self.by_rid and rid not in self._past_rids:
            self._dead_rids[rid] = now + TOMBSTONE_S
        for key in list(self.by_rid.get(rid, ())):
            self.fail(self.requests[key], aborted(reason or "the request was aborted"))

    def leases(self) -> Iterable[Lease]:
        """All live leases, those in limbo too."""
        return (r.lease for r in (*self.requests.values(), *self.limbo) if r.lease is not None)

    @contextmanager
    def border(self, request: Request) -> Iterator[None]:
        """An exception inside one request's handling fails that request, and is logged."""
        try:
            yield
        except Exception as e:
            self.blame(request, e)

    def blame(self, request: Request, error: Exception) -> None:
        """Fails a request for an exception in its handling."""
        if isinstance(error, ApiError):
            self.fail(request, error)
        elif isinstance(error, DeadEnd):
            self.fail(request, ApiError(400, f"the grammar of the answer has a dead end: {error}", code="invalid_grammar"))
        elif isinstance(error, TooHard):
            self.fail(request, ApiError(400, f"the grammar of the answer is too hard to follow: {error}", code="invalid_grammar"))
        elif isinstance(error, GrammarFault):
            text = f"the answer left its grammar: {error}"
            self.fail(request, ApiError(500, text, type=errors.SERVER, code="grammar_failed"))
        else:
            log.error("request %s/%d failed in the scheduler", *request.key, exc_info=error)
            self.fail(request, ApiError(500, f"the scheduler failed on this request: {error}", type=errors.SERVER, code="internal"))

    def rebuild(self) -> None:
        """Makes all counts anew, from the requests and the tree. Called by the self-check. Raises for what contradicts itself."""
        live = {id(r): r for r in self.requests.values()}
        self.limbo = {r for r in self.limbo if r.lease is not None}
        self.memory.rebuild(list(self.leases()))
        self.rows.rebuild(r for r in live.values() if r.lease is not None)
        self._count_held()
        by_rid: dict[str, set[Key]] = {}
        for key in self.requests:
            by_rid.setdefault(key[0], set()).add(key)
        self.by_rid = by_rid

    def _count_held(self) -> None:
        held = Held.nothing()
        for request in (*self.requests.values(), *self.limbo):
            if request.lease is not None:
                held.rows[request.kind] += request not in self.limbo
                held.pages[request.kind] += request.total_pages
        held.prefill_legs = sum(r.kind is Kind.PREFILL for r in self.requests.values())
        self.held = held

    def start_anew(self, error: ApiError) -> None:
        """Fails every request that holds pages, and begins with an empty cache. A room that a transfer still writes to keeps its pages: they
        stay lost to this worker until its restart, and no other request ever gets them."""
        holders = [r for r in self.requests.values() if r.lease is not None]
        kept = [r.lease.own_pages() for r in (*holders, *self.limbo) if r.room_open and r.lease is not None]
        for request in holders:
            request.lease = None
            request.slot = -1
        self.limbo.clear()
        self.memory.start_anew([page for pages in kept for page in pages])
        self.rows.rebuild([])
        self._count_held()
        for request in holders:
            self.fail(request, error)

    def check_quickly(self) -> None:
        """Counts only; at idle each second."""
        self.memory.check_quickly(self.leases())
        running = sum(r.lease is not None for r in self.requests.values())
        assert running == self.running == self.rows.used, "rows and requests that hold one differ"

    def check_integrity(self) -> None:
        """Every live request is where its state says, and all that is held adds up."""
        self.memory.check_integrity(self.leases())
        self.rows.check_integrity(r for r in self.requests.values() if r.lease is not None)
        places = [*self.plain_queue, *self.prefill_queue, *self.decode_queue, *self.prefilling, *self.decoding]
        assert len({r.key for r in places}) == len(places), "a request is in two places"
        for request in self.requests.values():
            assert request.state is not State.ENDED
            where = self._where(request)
            assert where is None or request in where
            assert request.lease is None or request.launched <= request.lease.count * PAGE_SIZE
            assert request.computed <= request.launched and 0 <= request.drawing <= 2
        assert all(r.key in self.requests for r in places)
        rows, pages = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
        for request in self.requests.values():
            if request.lease is not None:
                rows[request.kind] += 1
                pages[request.kind] += request.total_pages
        for request in self.limbo:
            assert request.state is State.ENDED and request.room_open
            pages[request.kind] += request.total_pages
        assert rows == self.held.rows and pages == self.held.pages
        assert self.held.prefill_legs == sum(r.kind is Kind.PREFILL for r in self.requests.values())


def _forget(rids: OrderedDict[str, float], now: float) -> None:
    """Drops what is over, and what is too much."""
    while rids and (len(rids) >= MAX_TOMBSTONES or next(iter(rids.values())) <= now):
        rids.popitem(last=False)


def aborted(message: str) -> ApiError:
    """The error of a request that somebody ended; derived, the router prefers another leg's cause."""
    return ApiError(499, message, type=errors.INVALID_REQUEST, code=errors.CODE_ABORTED)
