"""The scheduler's loop: receive, choose, launch a step, take the results of the one before. One iteration is `Scheduler.iterate`.

With --overlap a step is chosen and launched while the one before is still computed, so whatever is decided must hold for both outcomes of
that one. Who ends by length is known before and left out. Who ends otherwise draws one token too many, which is thrown away. Rows whose
draw depends on the token before (a grammar, penalties) are computed at once, and draw when that token is known. Two steps with prompts
never overlap: the second would be chosen before those that arrive meanwhile. Where pages are short nothing is launched until all has landed.

Knows no sockets and no clock of its own: messages are handed in by `handle`, results leave by the book's outbox, time comes from `clock`. So
tests run it over a virtual clock. An exception in the handling of one request fails that request; one of the executor's step is a fault
of the device or of ours and ends the process.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.names import PAGE_SIZE, ROLE_DECODE, ROLE_PREFILL
from fleet_runtime.cache import pages as owners
from fleet_runtime.cache.memory import KvMemory
from fleet_runtime.engine.base import Executor, Sampling, greedy
from fleet_runtime.messages import Abort, Admit, Control, Drain, RoomRejected, Stopped
from fleet_runtime.scheduler.admission import Capacity, overdue, refusal
from fleet_runtime.scheduler.batch import Batches, StepRow, row_of
from fleet_runtime.scheduler.book import Book, Outbox
from fleet_runtime.scheduler.choice import Chooser
from fleet_runtime.scheduler.control import Controls
from fleet_runtime.scheduler.disagg_decode import DecodeLegs
from fleet_runtime.scheduler.disagg_prefill import PrefillLegs
from fleet_runtime.scheduler.grammar import Compile, Grammars, Spawn
from fleet_runtime.scheduler.ratio import NewTokenRatio
from fleet_runtime.scheduler.request import Kind, Request, State
from fleet_runtime.scheduler.results import Results
from fleet_runtime.scheduler.rows import Rows
from fleet_runtime.scheduler.runner import InlineRunner, Runner, Ticket
from fleet_runtime.scheduler.sampling import sampling_of
from fleet_runtime.scheduler.self_check import SelfCheck
from fleet_runtime.scheduler.stages import Stages, now_ns
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


@dataclass(slots=True)
class Step:
    """One launched step. draws: of its rows that draw; late: they may draw only when the step before has landed."""

    rows: list[StepRow]
    draws: Sequence[StepRow]
    ticket: Ticket
    prefill: bool
    late: bool


def no_grammars(_: object) -> object:
    """The compiler of a scheduler without a tokenizer. Raises ValueError."""
    raise ValueError("this worker has no tokenizer for grammars")


class Scheduler:
    """See the module. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        flags: RuntimeLaunch,
        executor: Executor,
        outbox: Outbox,
        *,
        clock: Callable[[], float],
        transfer: KvTransfer | None = None,
        runner: Runner | None = None,
        compile: Compile = no_grammars,
        wake: Callable[[], None] | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        """runner: default: computes in `iterate`. compile, spawn: of grammars, and how a compilation is run. wake: called from other threads
        when `iterate` has something to do."""
        layout = executor.layout
        assert layout.page_size == PAGE_SIZE, "the executor's pages must be those of the contract"
        watch: dict[str, Any] = {"on_free": executor.poison} if flags.debug_checks else {}
        memory = KvMemory(layout.num_pages, eviction=flags.eviction_policy, **watch)
        rows = min(flags.max_rows, executor.slots)
        self.book = Book(
            memory=memory,
            capacity=Capacity.of(flags.role, rows=rows, pages=layout.num_pages),
            outbox=outbox,
            clock=clock,
            rows=Rows(rows),
            ratio=NewTokenRatio(flags.new_token_ratio),
            grammars=Grammars(compile, timeout_s=flags.grammar_timeout, clock=clock, wake=wake, spawn=spawn),
            transfer=transfer,
        )
        self.executor = executor
        self.runner = runner or InlineRunner(executor)
        self.stages = Stages()
        self.draining = False
        self.paused = False
        self._flags = flags
        self._clock = clock
        self._transfer = transfer
        self._prefill_legs = PrefillLegs(self.book, transfer) if transfer is not None and flags.role != ROLE_DECODE else None
        self._results = Results(self.book, self._prefill_legs)
        self._decode_legs = DecodeLegs(self.book, transfer, self._results.accept) if transfer is not None and flags.role != ROLE_PREFILL else None
        self._chooser = Chooser(self.book, flags)
        self._controls = Controls(self, flags)
        self._self_check = SelfCheck(self.book, clock)
        self._depth = 2 if flags.overlap else 1
        self._mask_words = -(-executor.vocab_size // 32)
        self._batches = Batches(self.book.rows, check=flags.debug_checks)
        self._launched: deque[Step] = deque()
        self._same: tuple[list[Request] | None, Sampling] = ([], greedy(0))  # who drew last, where that says how
        self._next_expiry = 0.0
        self._drain_deadline = float("inf")

    def iterate(self) -> bool:
        """One iteration; True if it launched a step or took one's results. False: nothing can be done until a message, an event or a step
        comes, or time passes."""
        stages, steps = self.stages, self.book.totals.steps
        stages.enter("receive")
        self._receive_events()
        self._receive_grammars()
        self._expire()
        stages.enter("admit")
        progress = False
        while self._launch():
            progress = True
        progress = self._land() or progress
        stages.enter("send")
        self.book.flush()
        stages.enter("other")
        if not self._launched and not progress:
            self._idle()
        stages.leave()
        if self.book.totals.steps != steps:
            stages.end_step()
        self._controls.poll()
        if self._flags.debug_checks:
            self.book.check_integrity()
        return progress

    @property
    def step_begun(self) -> float:
        """time.monotonic() when the executor began with what it computes now; 0 if nothing is launched."""
        return self._launched[0].ticket.begun if self._launched else 0.0

    @property
    def outstanding(self) -> int:
        """Launched steps whose results are not taken."""
        return len(self._launched)

    def _idle(self) -> None:
        book = self.book
        if not book.prefilling and not book.decoding:
            book.ratio.reset()
        self._self_check.run()

    # Receive.

    def handle(self, message: Admit | Abort | RoomRejected | Stopped | Drain | Control) -> None:
        """One message of a neighbour."""
        match message:
            case Admit():
                self._admit(message)
            case Abort():
                self.book.abort(message.rid, message.reason)
            case Stopped():
                request = self.book.requests.get((message.rid, message.index))
                if request is not None and message.serial in (0, request.serial):
                    self._complete(request)
            case RoomRejected():
                self._reject(message)
            case Control():
                self._controls.handle(message)
            case Drain():
                self.draining = True
                self.paused = False  # what runs is to end, not to stand until the deadline
                self._drain_deadline = message.deadline

    def _admit(self, message: Admit) -> None:
        before = self.book.requests.get((message.rid, message.index))
        if before is not None and before.opened:
            self._complete(before)  # http admits none twice: this one has ended by a stop string, and the word of it is still on its way
        request = self.book.enter(message)
        if request is None:
            log.warning("request %s/%d was not accepted: it is here already, or was aborted before it came", message.rid, message.index)
            return
        with self.book.border(request):
            if (error := self._refusal(request)) is not None:
                self.book.refuse(request, error)
            elif message.grammar is None:
                self._start(request)
            elif (error := self.book.grammars.start(request)) is not None:
                self.book.refuse(request, error)
            else:
                self.book.place(request, State.COMPILING)

    def _complete(self, request: Request) -> None:
        """Its answer is over by the word of http or the detokenizer; what is computed stays in the prefix cache."""
        self._results.commit(request)
        self.book.emit(request, [], "stop")

    def _refusal(self, request: Request) -> ApiError | None:
        if self.draining:
            return ApiError(503, "this worker is draining and takes no new requests", type=errors.OVERLOADED, code="draining")
        if request.admit.embed and not self.executor.hidden_size:
            return ApiError(400, "this worker's executor gives no embeddings", code="no_embeddings")
        book = self.book
        # What waits of the same request does not count: else one of many choices could never enter, and another would be let in by halves.
        own = [r for key in book.by_rid[request.admit.rid] if (r := book.requests[key]).lease is None]
        return refusal(
            book.capacity,
            request.kind,
            prompt_tokens=request.prompt_tokens,
            max_new=request.admit.max_new,
            pages=request.total_pages,
            waiting=book.waiting - len(own),
            max_queue=self._flags.max_queue,
            waiting_tokens=book.waiting_tokens - sum(r.prompt_tokens for r in own),
            max_queue_tokens=self._flags.max_queue_tokens,
        )

    def _receive_grammars(self) -> None:
        for request, error in self.book.grammars.poll():
            if request.state is not State.COMPILING:
                continue
            with self.book.border(request):
                if error is not None:
                    self.book.refuse(request, error)
                else:
                    self._start(request)

    def _start(self, request: Request) -> None:
        """All is there that it needs before it waits for a row."""
        if request.kind is Kind.PLAIN:
            self.book.place(request, State.WAITING)
        else:
            self._start_leg(request)

    def _start_leg(self, request: Request) -> None:
        if not 0 < request.admit.room < 2**63:
            text = f"room {request.admit.room} is no room; a number from 1 to 2**63 - 1 is allowed (0 names the connection itself)"
            self.book.fail(request, ApiError(400, text, code="invalid_room"))
            return
        legs = self._prefill_legs if request.kind is Kind.PREFILL else self._decode_legs
        if legs is None:
            text = f"this worker's role is {self._flags.role}; it serves no {request.kind.value} leg"
            self.book.refuse(request, ApiError(400, text, code="wrong_role"))
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
                    with self.book.border(request):
                        legs.on_event(request, event)
            case DecodeOpen() | DecodeComplete() | DecodeFailed() | DecodeClosed():
                if (decode := self._decode_legs) is not None and (request := decode.request_of(event)) is not None:
                    with self.book.border(request):
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
            if request.completion_tokens and not self._flags.running_timeout:
                continue
            error = overdue(
                now,
                deadline=request.admit.deadline,
                arrived=request.arrived,
                queue_timeout=self._flags.queue_timeout,
                running=request.started > 0,
                state=request.state.value,
                first_token=request.completion_tokens > 0,
                started=request.started,
                running_timeout=self._flags.running_timeout,
            )
            if error is not None:
                self.book.fail(request, error)

    # Launch and land.

    def _launch(self) -> bool:
        """Launches the next step, if one may be chosen now and holds anything."""
        if self.paused or len(self._launched) >= self._depth:
            return False
        previous = self._launched[-1] if self._launched else None
        self.book.elder = self._chooser.elder()
        if self._decode_legs is not None:
            self._decode_legs.reserve()
        chosen = self._chooser.choose(after_launch=previous is not None, after_prefill=previous is not None and previous.prefill)
        if not chosen:
            return False
        self.stages.enter("build")
        rows = [row_of(request, count) for request, count in chosen]
        batch = self._batches.build(rows)
        draws, late = list[StepRow](), False
        # From here on pages that become free are set aside: also those of a row whose sampling fails below.
        self.book.memory.step_launched()
        number = self.book.totals.steps + len(self._launched) + 1
        drawn = self.book.rows.drawn
        for row in rows:
            request = row.request
            request.launched += row.count
            request.last_step = number
            if row.place >= 0:
                late = late or (request.drawing > 0 and request.needs_last_token)
                request.drawing += 1
                drawn(request)
                draws.append(row)
        if late:
            ticket = self.runner.forward(batch)
        else:
            sampling = self._sampling(draws)
            self.stages.enter("launch")
            began = now_ns()
            ticket = self.runner.step(batch, sampling)
            if ticket.done:  # it was computed in this thread
                self.stages.away(now_ns() - began)
        self._launched.append(Step(rows, draws, ticket, prefill=any(row.prefill for row in rows), late=late))
        return True

    def _sampling(self, draws: Sequence[StepRow]) -> Sampling:
        """How these rows draw; the arrays of the step before where they say the same."""
        requests = [draw.request for draw in draws]
        if requests == self._same[0]:
            return self._same[1]
        sampling = sampling_of(draws, words=self._mask_words, fault=self.book.blame)
        if sampling.masks is not None:
            self.book.totals.grammar_rows += len(sampling.masks)
        constant = sampling.bias_ids is None and sampling.counts is None and all(r.grammar is None for r in requests)
        self._same = (requests if constant else None, sampling)
        return sampling

    def _land(self) -> bool:
        """Takes the results of the oldest step, if they are there; then the next may draw, if it waits for that. Raises what the executor did."""
        if not self._launched:
            return False
        step = self._launched[0]
        if not step.ticket.done:
            return False
        self._launched.popleft()
        self.stages.enter("process")
        output = step.ticket.result()
        self.book.memory.step_landed()
        self._results.take(step.rows, output)
        self.stages.note("executor", int((step.ticket.ended - step.ticket.begun) * 1e9))
        if self._launched and (after := self._launched[0]).late:
            after.late = False
            self.stages.enter("build")
            self.runner.sample(after.ticket, self._sampling(after.draws))
        if not step.prefill:
            self.book.ratio.decay()
        return True

    # Facts for the heartbeat and the load report.

    @property
    def prompt_tokens_waiting(self) -> int:
        """Uncached prompt tokens still to compute."""
        queued = sum(r.uncached_guess for q in (self.book.plain_queue, self.book.prefill_queue) for r in q)
        return queued + sum(r.prefill_left for r in self.book.prefilling)

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
            "retractions_total": totals.retractions,
            "grammar_rows_total": totals.grammar_rows,
            "wasted_tokens_total": totals.wasted_tokens,
            "self_check_failures_total": totals.self_check_failures,
            "scheduler_us_total": self.stages.busy_ns // 1000,
            "running_requests": self.book.running,
            "waiting_requests": self.book.waiting,
            "waiting_tokens": self.book.waiting_tokens,
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
