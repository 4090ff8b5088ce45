"""The scheduler's loop: receive, choose, step, process the results. One iteration is `Scheduler.iterate`.

Knows no sockets and no clock of its own: messages are handed in by `handle`, results leave by the book's outbox, time comes from `clock`. So
tests run it over a virtual clock. An exception in the handling of one request fails that request; one of the executor's step is a fault
of the device or of ours and ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.names import PAGE_SIZE, ROLE_DECODE, ROLE_PREFILL
from fleet_runtime.cache import pages as owners
from fleet_runtime.cache.memory import KvMemory, pages_for
from fleet_runtime.engine.base import Executor, StepOutput
from fleet_runtime.messages import Abort, Admit, Drain, RoomRejected, Stopped
from fleet_runtime.scheduler.admission import Capacity, overdue, refusal
from fleet_runtime.scheduler.batch import build_step
from fleet_runtime.scheduler.book import Book, Outbox
from fleet_runtime.scheduler.disagg_decode import DecodeLegs
from fleet_runtime.scheduler.disagg_prefill import PrefillLegs
from fleet_runtime.scheduler.policy import Limits, decode_ride, plan_step
from fleet_runtime.scheduler.request import Kind, Request, State
from fleet_runtime.transfer.base import (
    DecodeClosed,
    DecodeComplete,
    DecodeFailed,
    DecodeOpen,
    Event,
    KvTransfer,
    PrefillAllocated,
    PrefillClosed,
    PrefillFailed,
    PrefillReceived,
)

log = logging.getLogger(__name__)
EXPIRY_EVERY_S: Final = 0.05


class Scheduler:
    """See the module. Not thread-safe: one thread calls it."""

    def __init__(
        self, flags: RuntimeLaunch, executor: Executor, outbox: Outbox, *, clock: Callable[[], float], transfer: KvTransfer | None = None
    ) -> None:
        layout = executor.layout
        assert layout.page_size == PAGE_SIZE, "the executor's pages must be those of the contract"
        memory = KvMemory(layout.num_pages, on_free=executor.poison) if flags.debug_checks else KvMemory(layout.num_pages)
        capacity = Capacity.of(flags.role, rows=flags.max_rows, pages=layout.num_pages)
        self.book = Book(memory=memory, capacity=capacity, outbox=outbox, clock=clock, transfer=transfer)
        self.executor = executor
        self.draining = False
        self._flags = flags
        self._clock = clock
        self._transfer = transfer
        self._limits = Limits(flags.max_step_tokens, flags.max_prefill_steps)
        self._prefill_legs = PrefillLegs(self.book, transfer) if transfer is not None and flags.role != ROLE_DECODE else None
        self._decode_legs = DecodeLegs(self.book, transfer, self._accept) if transfer is not None and flags.role != ROLE_PREFILL else None
        self._prefill_steps = 0  # since the last step with decode rows
        self._next_expiry = 0.0
        self._drain_deadline = float("inf")

    def iterate(self) -> bool:
        """One iteration; True if it computed a step. False: nothing can run until a message or an event comes, or time passes."""
        self._receive_events()
        self._expire()
        rows = self._choose()
        if rows:
            output = self.executor.step(*build_step(rows))
            self._process(rows, output)
        self.book.flush()
        if self._flags.debug_checks:
            self.book.check_integrity()
        return bool(rows)

    # Receive.

    def handle(self, message: Admit | Abort | RoomRejected | Stopped | Drain) -> None:
        """One message of a neighbour."""
        match message:
            case Admit():
                self._admit(message)
            case Abort():
                self.book.abort(message.rid, message.reason)
            case Stopped():
                if (request := self.book.requests.get((message.rid, message.index))) is not None:
                    self.book.totals.finished += 1
                    self._commit_computed(request)
                    self.book.end(request)
            case RoomRejected():
                self._reject(message)
            case Drain():
                self.draining = True
                self._drain_deadline = message.deadline

    def _admit(self, message: Admit) -> None:
        request = self.book.enter(message)
        if request is None:
            log.warning("request %s/%d was not accepted: it is here already, or was aborted before it came", message.rid, message.index)
            return
        with self._border(request):
            if self.draining:
                error: ApiError | None = ApiError(503, "this worker is draining and takes no new requests", type=errors.OVERLOADED, code="draining")
            else:
                error = refusal(
                    self.book.capacity,
                    request.kind,
                    prompt_tokens=request.prompt_tokens,
                    max_new=message.max_new,
                    pages=request.total_pages,
                    waiting=self.book.waiting - 1,
                    max_queue=self._flags.max_queue,
                )
            if error is not None:
                self._refuse(request, error)
            elif request.kind is Kind.PLAIN:
                self.book.place(request, State.WAITING)
            else:
                self._start_leg(request)

    def _refuse(self, request: Request, error: ApiError) -> None:
        """Fails a request at entry. The other leg of a pair must hear of it, or it would wait."""
        admit = request.admit
        self.book.fail(request, error)
        if self._transfer is not None and request.kind is not Kind.PLAIN:
            self._transfer.reject(admit.room, admit.leg, admit.bootstrap, admit.prefill_incarnation, error)

    def _start_leg(self, request: Request) -> None:
        if not 0 < request.admit.room < 2**63:
            text = f"room {request.admit.room} is no room; a number from 1 to 2**63 - 1 is allowed (0 names the connection itself)"
            self.book.fail(request, ApiError(400, text, code="invalid_room"))
            return
        legs = self._prefill_legs if request.kind is Kind.PREFILL else self._decode_legs
        if legs is None:
            text = f"this worker's role is {self._flags.role}; it serves no {request.kind.value} leg"
            self._refuse(request, ApiError(400, text, code="wrong_role"))
        else:
            legs.start(request)

    def _reject(self, message: RoomRejected) -> None:
        if self._transfer is None:
            return
        error = ApiError(message.status, message.message, type=message.type or errors.INVALID_REQUEST, code=message.code or "rejected")
        for room in filter(None, message.rooms):
            self._transfer.reject(room, message.leg, message.bootstrap, message.prefill_incarnation, error)

    def drop_all(self, cause: str) -> None:
        """A process that every request needs is gone: ends them all. Where it was http, the detokenizer must hear of each: tokens that are
        still on their way to it may open a choice after it has cleared all."""
        error = ApiError(503, cause, type=errors.SERVER, code=errors.CODE_PEER_FAILED)
        for request in list(self.book.requests.values()):
            self.book.fail(request, error)

    def _receive_events(self) -> None:
        if self._transfer is None:
            return
        self._transfer.beat()
        for event in self._transfer.poll():
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case PrefillAllocated() | PrefillReceived() | PrefillFailed() | PrefillClosed():
                if (legs := self._prefill_legs) is not None and (request := legs.request_of(event)) is not None:
                    with self._border(request):
                        legs.on_event(request, event)
            case DecodeOpen() | DecodeComplete() | DecodeFailed() | DecodeClosed():
                if (decode := self._decode_legs) is not None and (request := decode.request_of(event)) is not None:
                    with self._border(request):
                        decode.on_event(request, event)

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_expiry:
            return
        self._next_expiry = now + EXPIRY_EVERY_S
        if now >= self._drain_deadline:
            late = ApiError(503, "this worker was shut down before the request was done", type=errors.OVERLOADED, code="drain_deadline")
            for request in list(self.book.requests.values()):
                self.book.fail(request, late)
        for request in list(self.book.requests.values()):
            if request.completion_tokens:
                continue
            error = overdue(
                now,
                deadline=request.admit.deadline,
                arrived=request.arrived,
                queue_timeout=self._flags.queue_timeout,
                running=request.lease is not None,
                state=request.state.value,
            )
            if error is not None:
                self.book.fail(request, error)

    # Choose.

    def _choose(self) -> list[tuple[Request, int]]:
        """The rows of the next step, with their pages taken."""
        book = self.book
        if self._decode_legs is not None:
            self._decode_legs.reserve()
        ride = decode_ride(self._limits, decode_rows=len(book.decoding), prefill_steps=self._prefill_steps)
        self._admit_waiting(self._limits.step_tokens - ride - sum(r.prompt_left for r in book.prefilling))
        plan = plan_step(
            self._limits, [r.prompt_left for r in book.prefilling], [r.last_step for r in book.decoding], prefill_steps=self._prefill_steps
        )
        rows = [(book.prefilling[i], n) for i, n in plan.chunks] + [(book.decoding[i], 1) for i in plan.decode]
        self._prefill_steps = 0 if plan.decode or not book.decoding else self._prefill_steps + 1
        for request, n in rows:
            assert request.lease is not None
            book.memory.grow(request.lease, pages_for(request.computed + n))
        return rows

    def _admit_waiting(self, budget: int) -> None:
        """Lets waiting prompts in while the step has tokens left for them. Within a queue nobody overtakes; of the two queues the older head
        goes first, and where it does not fit, the other may."""
        book = self.book
        while budget > 0:
            heads = sorted((q[0] for q in (book.plain_queue, book.prefill_queue) if q), key=lambda r: r.arrived)
            entered = next((r for r in heads if book.try_lease(r)), None)
            if entered is None:
                return
            assert entered.lease is not None
            entered.computed = entered.lease.shared * PAGE_SIZE
            entered.cached_tokens = entered.computed
            book.totals.cached_tokens += entered.cached_tokens
            book.place(entered, State.PREFILLING)
            budget -= entered.prompt_left

    # Process results.

    def _process(self, rows: list[tuple[Request, int]], output: StepOutput) -> None:
        totals = self.book.totals
        totals.steps += 1
        for i, (request, n) in enumerate(rows):
            with self._border(request):
                prefill = request.state is State.PREFILLING
                request.computed += n
                request.last_step = totals.steps
                if prefill:
                    totals.prefilled_tokens += n
                else:
                    totals.decode_tokens += n
                sampled = request.computed == request.length
                if output.failed[i]:  # before the tree or another worker gets any page of this step
                    text = "the model's output for this request is not a finite number"
                    self.book.fail(request, ApiError(500, text, type=errors.SERVER, code="numeric_error"))
                    continue
                if prefill:
                    self._chunk_done(request)
                if sampled:
                    self._sampled(request, int(output.tokens[i]))

    def _chunk_done(self, request: Request) -> None:
        """The tree takes the whole pages of the chunk; those of a prefill leg go to decode."""
        self._commit_computed(request)
        if request.kind is Kind.PREFILL:
            assert self._prefill_legs is not None
            self._prefill_legs.send_computed(request)

    def _sampled(self, request: Request, token: int) -> None:
        if request.kind is Kind.PREFILL:
            assert self._prefill_legs is not None
            self._prefill_legs.finish(request, token)
            return
        if request.state is State.PREFILLING:
            self.book.place(request, State.DECODING)
        self._accept(request, token)

    def _accept(self, request: Request, token: int) -> None:
        """A new token of the answer; a stop id ends it before the length does."""
        request.ids[request.length] = token
        request.length += 1
        if token in request.stop_ids:
            finish: str | None = "stop"
        else:
            finish = "length" if request.completion_tokens >= request.admit.max_new else None
        if finish is not None:
            self._commit_computed(request)
        self.book.emit(request, [] if finish == "stop" else [token], finish)

    def _commit_computed(self, request: Request) -> None:
        if request.lease is not None and request.computed:
            self.book.memory.commit(request.lease, request.page_key(request.computed))

    @contextmanager
    def _border(self, request: Request) -> Iterator[None]:
        """An exception inside one request's handling fails that request, and is logged."""
        try:
            yield
        except Exception as e:
            log.exception("request %s/%d failed in the scheduler", *request.key)
            self.book.fail(request, ApiError(500, f"the scheduler failed on this request: {e}", type=errors.SERVER, code="internal"))

    # Facts for the heartbeat and the load report.

    @property
    def prompt_tokens_waiting(self) -> int:
        """Uncached prompt tokens still to compute."""
        queued = sum(r.uncached_guess for q in (self.book.plain_queue, self.book.prefill_queue) for r in q)
        return queued + sum(r.prompt_left for r in self.book.prefilling)

    def counters(self) -> dict[str, int]:
        """Values for heartbeat.COUNTERS."""
        totals, pages = self.book.totals, self.book.memory.pages
        out = {
            "steps_total": totals.steps,
            "prefilled_tokens_total": totals.prefilled_tokens,
            "decode_tokens_total": totals.decode_tokens,
            "cached_tokens_total": totals.cached_tokens,
            "received_tokens_total": totals.received_tokens,
            "finished_requests_total": totals.finished,
            "failed_requests_total": totals.failed,
            "aborted_requests_total": totals.aborted,
            "running_requests": self.book.running,
            "waiting_requests": self.book.waiting,
            "pages_total": pages.num_pages,
            "pages_free": pages.count(owners.FREE),
            "pages_tree": pages.count(owners.TREE),
            "pages_request": pages.count(owners.REQUEST),
        }
        if self._transfer is not None:
            transfer = self._transfer.counters
            out |= {
                "transfer_rooms_total": transfer.rooms,
                "transfer_failures_total": transfer.failures,
                "transfer_pages_total": transfer.pages,
                "transfer_bytes_total": transfer.bytes,
                "transfer_checksum_failures_total": transfer.checksum_failures,
                "transfer_late_messages_total": transfer.late_messages,
            }
        return out
