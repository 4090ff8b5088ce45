"""One attempt at a request: sends its legs, merges what comes back, streams the answer's bytes unchanged, ends everything with it.

Called by `handling` with a lease; never retries itself, but says whether another attempt may. How the legs of a pair are written and
find each other is the hand-over of their engine (`engines`). A stream is passed on in whole events only, so that an error event can
always follow what the client has; bytes are never changed. Callbacks on the event loop, no task per leg.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from fleet_contract import names
from fleet_contract.errors import CODE_STALE_WORKER, DERIVED_CODES, TIMEOUT, ApiError
from fleet_router import errors
from fleet_router.alarms import Alarm
from fleet_router.api.body import Parsed, Prompt
from fleet_router.api.dialects import OPENAI
from fleet_router.api.paths import CHAT, COMPLETIONS
from fleet_router.api.sse import UsageFilter
from fleet_router.counters import Counters
from fleet_router.desk import Lease, Leg
from fleet_router.engines.base import HandOver, Parts, Sending, asks_usage, key_headers
from fleet_router.engines.kinds import engine_of
from fleet_router.http.client import Handle, Pool, Sink, collect, fetch
from fleet_router.http.exchange import Exchange
from fleet_router.identifiers import random_hex
from fleet_router.table import WorkerView

log = logging.getLogger(__name__)

PEER_CAUSE_S: Final = 0.1  # a derived error waits so long for the other leg's own
WELL: Final = ("ready", "draining")  # states of a worker that computes
LOOK_AGAIN_S: Final = 1.0  # at the workers of an answer that takes long
DEADLINE_GRACE_S: Final = 1.0  # the worker's own deadline answer comes first
MAX_HELD_BYTES: Final = 64 << 10  # of one unfinished event
MAX_ANSWER_BYTES: Final = 64 << 20  # of an answer that is no stream
ABORT_TIMEOUT_S: Final = 2.0
PATIENCE_S: Final = 30.0  # the longest that KV may stay promised to a request whose client has gone
SETTLE_S: Final = 2.0
TAIL_BYTES: Final = 4096  # of the last piece, or of the last two when it is shorter: the usage is in there
TRANSFER_S: Final = 10.0  # of a hand-over, from the prefill's answer to the first token; longer for a long prompt:
TRANSFER_FACTOR: Final = 3.0
CODE_TRANSFER_FAILED: Final = "transfer_failed"
NOT_TAKEN: Final = ("worker_unreachable", CODE_STALE_WORKER, "worker_restarting", "loading", "draining")  # the worker never had the request


class Timing:
    """Limits of one attempt."""

    def __init__(self, first_token_s: float, silence_s: float, answer_s: float) -> None:
        self.first_token_s = first_token_s
        self.silence_s = silence_s
        self.answer_s = answer_s  # of an answer in one piece: nobody sees its first token


class Answer:
    """A whole answer of a worker, passed on as it is."""

    def __init__(self, status: int, content_type: bytes, body: bytes, retry_after: bytes | None = None) -> None:
        self.status = status
        self.content_type = content_type
        self.body = body
        self.retry_after = retry_after


class Failure:
    """Why an attempt failed, and which worker said so. `answer` is the worker's own words, when it had any.

    `is_echo`: it may only repeat what became of the other leg, as an engine that has no code for that says it.
    """

    def __init__(self, error: ApiError, worker: WorkerView, answer: Answer | None = None, is_echo: bool = False) -> None:
        self.error = error
        self.worker = worker
        self.answer = answer
        self.is_echo = is_echo

    @property
    def derived(self) -> bool:
        return self.is_echo or self.error.code in DERIVED_CODES

    @property
    def undelivered(self) -> bool:
        """The worker never took the request."""
        return self.error.code in NOT_TAKEN

    @property
    def retryable(self) -> bool:
        """Another attempt can help and cannot do the work twice."""
        return self.undelivered or self.is_echo or self.error.status in (502, 503) or self.error.code == CODE_TRANSFER_FAILED

    @property
    def is_fault(self) -> bool:
        """The worker itself is to blame: never for 4xx or a busy worker."""
        if self.is_echo:
            return False
        return self.error.code in ("worker_unreachable", "worker_lost", "worker_timeout", "bad_worker_answer") or self.error.status == 500


class Outcome:
    """How an attempt ended. `streamed`: the client has bytes of it. Else exactly one of `answer` and `failure` is set, or the client is gone."""

    def __init__(self, streamed: bool = False, gone: bool = False, answer: Answer | None = None, failure: Failure | None = None) -> None:
        self.streamed = streamed
        self.gone = gone
        self.answer = answer
        self.failure = failure


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """The failure to report: the first that is not derived from another leg's; None when all are."""
    return next((f for f in failures if not f.derived), None)


class Aborter:
    """Tells workers that a request is gone; owns these calls, and the attempts that outlive their client, until they are over."""

    def __init__(self, pool: Pool, count: Counters) -> None:
        self._pool = pool
        self._count = count
        self._tasks: set[asyncio.Future[None]] = set()

    def abort(self, worker: WorkerView, rid: str) -> None:
        """Returns at once; tried twice. Nothing to call where the closed connection has told the engine."""
        engine = engine_of(worker.record.engine)
        if engine.abort_path:
            self.keep(asyncio.get_running_loop().create_task(self._call(worker, engine.abort_path, engine.abort_body(rid))))
        self._count.add("aborts_total")

    def send(self, worker: WorkerView, parts: Parts) -> None:
        """One request whose answer nobody needs."""
        self.keep(asyncio.get_running_loop().create_task(self._send(worker, parts)))

    def keep(self, work: asyncio.Future[None]) -> None:
        """Something that a closing router waits for."""
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)

    async def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Waits for what is under way."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)

    async def _call(self, worker: WorkerView, path: str, body: bytes) -> None:
        for _ in range(2):
            try:
                headers = key_headers(worker.record.key_env)
                await fetch(self._pool, worker.host, worker.port, "POST", path, body=body, headers=headers, timeout_s=ABORT_TIMEOUT_S)
                return
            except ApiError as e:
                log.debug("abort call failed", extra={"worker": worker.name, "reason": e.message})

    async def _send(self, worker: WorkerView, parts: Parts) -> None:
        try:
            await collect(self._pool, worker.host, worker.port, parts, timeout_s=PATIENCE_S, what="the request")
        except ApiError as e:
            log.debug("a request that frees memory failed", extra={"worker": worker.name, "reason": e.message})


class _LegSink(Sink):
    """One leg's answer."""

    def __init__(self, attempt: Attempt, leg: Leg, serving: bool) -> None:
        self.attempt: Attempt | None = attempt  # until it is over: nothing comes after that, and a circle would be left to the garbage collector
        self.leg = leg
        self.serving = serving
        self.engine = engine_of(leg.worker.record.engine)
        self.handle: Handle | None = None
        self.status = 0
        self.content_type = b"application/json"
        self.retry_after: bytes | None = None
        self.streaming = False
        self.open = False  # sent, and not over
        self.body = bytearray()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        self.status = status
        for name, value in headers:
            lower = name.lower()
            if lower == b"content-type":
                self.content_type = value
            elif lower == b"retry-after":
                self.retry_after = value
        self.streaming = self.serving and status == 200 and attempt.dialect.is_stream(self.content_type)

    def on_body(self, data: bytes) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        if self.streaming:
            attempt.on_stream(data)
            return
        self.body += data
        if len(self.body) > MAX_ANSWER_BYTES:
            text = f"worker {self.leg.worker.name} sent an answer of more than {MAX_ANSWER_BYTES} bytes"
            self.fail(ApiError(502, text, type="server_error", code="bad_worker_answer"))

    def on_end(self) -> None:
        attempt = self.attempt
        self.open = False
        if attempt is None:
            return
        if self.streaming:
            attempt.on_stream_end(None)
        elif self.status < 300:
            attempt.on_answer(self, self.answer())
        else:
            error = self.engine.error(self.status, bytes(self.body))
            attempt.on_failure(self, Failure(error, self.leg.worker, self.answer(), attempt.may_echo(error)))

    def on_lost(self, error: ApiError) -> None:
        attempt = self.attempt
        self.open = False
        if attempt is None:
            return
        if self.streaming and attempt.streamed:
            attempt.on_stream_end(error)
        else:
            attempt.on_failure(self, Failure(error, self.leg.worker))

    def answer(self) -> Answer:
        return Answer(self.status, self.content_type, bytes(self.body), self.retry_after)

    def fail(self, error: ApiError) -> None:
        """It is ended here, for what it sent or did not send."""
        attempt = self.attempt
        self.open = False
        if self.handle is not None:
            self.handle.close()
        if attempt is not None:
            attempt.on_failure(self, Failure(error, self.leg.worker, is_echo=attempt.may_echo(error)))

    def leave(self) -> None:
        """The attempt is over."""
        self.attempt = self.handle = None


class Attempt:
    """See the module. `start` tells the outcome once; by then every leg is ended and every count given back."""

    def __init__(self, pool: Pool, aborter: Aborter, exchange: Exchange, lease: Lease, timing: Timing) -> None:
        self.streamed = False
        self.dialect = OPENAI  # of the request's path, see `start`
        self.events = 0  # of the stream, as far as it was passed on
        self.made: int | None = None  # tokens of the answer, as its end told them
        self.prompt_tokens: int | None = None  # of a prompt that was not tokenised here, as its end told them
        self._pool = pool
        self._aborter = aborter
        self._exchange = exchange
        self._lease = lease
        self._timing = timing
        self._loop = pool.loop
        self._then: Callable[[Outcome], None] | None = None
        self._over = False
        self._serving = _LegSink(self, lease.serving, True)
        self._sinks = [self._serving] if lease.prefill is None else [_LegSink(self, lease.prefill, False), self._serving]
        self._hand_over: HandOver | None = None
        self._failures: list[Failure] = []
        self._alarm = Alarm()
        self._began = self._loop.time()
        self._prefill_took = 0.0
        self._stream_asked = False
        self._is_estimate = False  # what we know of the prompt's length
        self._left: asyncio.Future[None] | None = None  # the client is gone, and the KV of both workers has yet to be freed
        self._usage: UsageFilter | None = None
        self._held = b""
        self._mid_event = False
        self._tail: tuple[bytes, bytes] = (b"", b"")
        self._last_at = 0.0
        self._was_paused = False  # the client was slow: times say nothing about the worker
        self.first_byte_at: float | None = None  # loop time
        self._parsed: Parsed | None = None
        self._prompt: Prompt | None = None
        self.rid = random_hex(16)

    def may_echo(self, error: ApiError) -> bool:
        """An engine that is not ours names no cause when it is the other leg's: any 500 of a pair may be that."""
        return error.status == 500 and self._lease.prefill is not None and self._serving.engine.kind != names.ENGINE_OURS

    def start(self, parsed: Parsed, prompt: Prompt, then: Callable[[Outcome], None]) -> None:
        """Sends the legs. `then` hears the outcome, maybe before this returns. Raises ApiError, and tells no outcome, for what cannot be sent."""
        exchange = self._exchange
        self.dialect = parsed.dialect
        exchange.on_gone, exchange.on_pause, exchange.on_resume = self.client_gone, self._pause, self._resume
        self._set_limit(self._timing.first_token_s + DEADLINE_GRACE_S, self._late)
        self._then = then
        self._parsed, self._prompt = parsed, prompt
        try:
            self._send(parsed, prompt)
        except BaseException:
            self._then = None
            self._finish(Outcome(gone=True))
            raise

    # -- from the legs

    def on_stream(self, data: bytes) -> None:
        """Bytes of the serving leg's stream."""
        if self._over:
            return
        if self._left is not None:  # it has its first token: now it may end
            self._finish(Outcome(gone=True))
            return
        if self._held:
            data = self._held + data
        end = self.dialect.event_end(data)
        if end:
            self._held = data[end:]
            self._pass_events(data[:end] if self._held else data)
        elif len(data) > MAX_HELD_BYTES or self._mid_event:
            self._held = b""
            self._forward(data, mid_event=True)
        else:
            self._held = data

    def on_stream_end(self, error: ApiError | None) -> None:
        """The serving leg's stream is over; without an error it ended as HTTP says, but may still lack its last event."""
        if self._over:
            return
        ended, failed = self.dialect.last_words(self._tail[1])
        if not self.streamed:
            worker = self._lease.serving.worker
            lost = error or errors.worker_lost(worker.name, "the stream was empty")
            self.on_failure(self._serving, Failure(lost, worker))
            return
        self._learn_from_stream()
        if error is None and ended and not self._held:
            self._exchange.finish()
        else:
            if not failed and not self._mid_event:
                lost = error or errors.worker_lost(self._lease.serving.worker.name, f"the stream ended without {self.dialect.end_name}")
                self._exchange.write(self.dialect.error_event(lost, self._exchange.request.request_id))
            self._exchange.cut()
        self._finish(Outcome(streamed=True))

    def on_answer(self, sink: _LegSink, answer: Answer) -> None:
        """A whole 2xx answer of one leg."""
        if self._over:
            return
        if not sink.serving:
            self._prefill_answered(sink, answer)
        elif self._left is not None:
            self._finish(Outcome(gone=True))
        else:
            if self._lease.prefill is None and (cached := self.dialect.cached_tokens(answer.body)) is not None:
                self._lease.cached(cached)
            self.made = self.dialect.made_tokens(answer.body)
            if self._is_estimate:
                self.prompt_tokens = self.dialect.prompt_tokens(answer.body)
            self._finish(Outcome(answer=answer))

    def on_failure(self, sink: _LegSink, failure: Failure) -> None:
        """One leg ended badly before the client had a byte of it."""
        if self._over:
            return
        if self.streamed:  # the prefill's fate changes nothing any more
            if sink.serving:
                self.on_stream_end(failure.error)
            return
        self._failures.append(failure)
        cause = first_cause(self._failures)
        if cause is not None:
            self._finish(Outcome(failure=cause))
        elif all(not s.open for s in self._sinks):
            self._finish(Outcome(failure=failure))
        else:
            self._set_limit(PEER_CAUSE_S, self._no_other_cause)

    # -- from the client

    def client_gone(self) -> None:
        """Nobody waits for an answer: ends the legs, or leaves them to end when they may."""
        plan = self._hand_over
        if plan is None or not plan.patient or self.streamed or self._over or self._left is not None or not any(s.open for s in self._sinks):
            self._finish(Outcome(gone=True, streamed=self.streamed))
            return
        self._left = self._loop.create_future()
        self._aborter.keep(self._left)
        self._set_limit(PATIENCE_S, lambda: self._finish(Outcome(gone=True)))

    def abort(self, error: ApiError) -> None:
        """Somebody else than the client wants its end: it hears the error."""
        if self.streamed:
            self.on_stream_end(error)
        else:
            self._finish(Outcome(failure=Failure(error, self._lease.serving.worker)))

    def _pause(self) -> None:
        self._was_paused = True
        if (handle := self._serving.handle) is not None:
            handle.pause()

    def _resume(self) -> None:
        if (handle := self._serving.handle) is not None:
            handle.resume()

    # -- limits

    def _set_limit(self, seconds: float, then: Callable[[], None]) -> None:
        self._pool.alarms.set(self._alarm, seconds, then)

    def _no_other_cause(self) -> None:
        self._finish(Outcome(failure=self._failures[0]))

    def _late(self) -> None:
        """The first token is overdue. An answer in one piece may take longer, as long as its workers are well: they have that limit too."""
        worker = self._lease.serving.worker
        took = self._loop.time() - self._began
        if (
            not self._stream_asked
            and not self._serving.status
            and all(leg.worker.state in WELL and not leg.worker.removed for leg in self._lease.legs())
        ):
            if took < self._timing.answer_s:
                self._set_limit(min(LOOK_AGAIN_S, self._timing.answer_s - took), self._late)
                return
            error = errors.worker_timeout(worker.name, "gave no whole answer", self._timing.answer_s, "--answer-timeout of the router")
        else:
            error = errors.worker_timeout(worker.name, "gave no first token", self._timing.first_token_s, "--first-token-timeout of the router")
        self._finish(Outcome(failure=Failure(error, worker)))

    def _transfer_late(self) -> None:
        worker = self._lease.serving.worker
        text = f"worker {worker.name} gave no first token within {self._transfer_s():.0f} s of the prefill's answer"
        self._finish(Outcome(failure=Failure(ApiError(504, text, type=TIMEOUT, code=CODE_TRANSFER_FAILED), worker)))

    def _transfer_s(self) -> float:
        """How long the hand-over may take: the prefill's own time says how long the prompt is."""
        return max(TRANSFER_S, TRANSFER_FACTOR * self._prefill_took)

    def _check_silence(self) -> None:
        quiet = self._loop.time() - self._last_at
        if self._exchange.paused:
            quiet = 0.0
        if quiet < self._timing.silence_s:
            self._set_limit(self._timing.silence_s - quiet, self._check_silence)
            return
        worker = self._lease.serving.worker
        self.on_stream_end(errors.worker_timeout(worker.name, "sent nothing more", self._timing.silence_s, "--silence-timeout of the router"))

    # -- inside

    def _send(self, parsed: Parsed, prompt: Prompt) -> None:
        """The legs that go at once."""
        deadline_ms = max(1, int(self._timing.first_token_s * 1000))
        sending = Sending(self._lease, parsed, prompt, self.rid, self._exchange.request.request_id, deadline_ms)
        self._stream_asked, self._is_estimate = parsed.stream, prompt.ids is None
        if self._serving.engine.wants_usage and parsed.stream and parsed.route in (CHAT, COMPLETIONS) and not asks_usage(parsed.fields):
            self._usage = UsageFilter()
        self._hand_over = self._serving.engine.hand_over(sending)
        for leg, parts in self._hand_over.first():
            if self._over:
                return
            self._start(self._serving if leg is self._lease.serving else self._sinks[0], parts)

    def _forget_request(self) -> None:
        """It is not sent again: a long stream need not keep it."""
        if self._parsed is not None and self._prompt is not None:
            self._parsed.body, self._parsed.fields, self._prompt.ids = b"", {}, None

    def _start(self, sink: _LegSink, parts: Parts) -> None:
        sink.open = True
        sink.handle = self._pool.start(sink.leg.worker.host, sink.leg.worker.port, parts, sink)

    def _prefill_answered(self, sink: _LegSink, answer: Answer) -> None:
        """The prompt is computed, and handed over or ready to be."""
        assert self._hand_over is not None
        lease = self._lease
        if not lease.over:
            if (cached := self._hand_over.cached(answer.body)) is not None:
                lease.cached(cached)
            lease.first_token()
            lease.release_leg(sink.leg)
        self._prefill_took = self._loop.time() - self._began
        parts = self._hand_over.after_prefill(answer.body, left=self._left is not None)
        if parts is not None:
            self._start(self._serving, parts)
        if self._left is not None and not self._serving.open:
            self._finish(Outcome(gone=True))
        elif self._left is None and self._hand_over.watches_transfer and self._stream_asked and not self.streamed:
            left_s = self._began + self._timing.first_token_s + DEADLINE_GRACE_S - self._loop.time()
            if self._transfer_s() < left_s:
                self._set_limit(self._transfer_s(), self._transfer_late)

    def _pass_events(self, data: bytes) -> None:
        """Whole events of the stream; the first may say that there will be none."""
        if not self.streamed and (error := self._serving.engine.error_event(data)) is not None:
            self._serving.fail(error)
            return
        self._forward(data if self._usage is None else self._usage(data), mid_event=False)

    def _forward(self, data: bytes, *, mid_event: bool) -> None:
        self._last_at = self._loop.time()
        if not data:
            return
        if not self.streamed:
            self.streamed = True
            self.first_byte_at = self._last_at
            self._lease.first_token()
            self._forget_request()
            self._exchange.start_stream(self._serving.content_type)
            self._set_limit(self._timing.silence_s, self._check_silence)
        self._mid_event = mid_event
        before = self._tail[1] if len(data) < TAIL_BYTES else b""
        self._tail = (before, data[-TAIL_BYTES:])  # not the pieces themselves: a slow reader's are large
        self.events += self.dialect.events(data)
        self._exchange.write(data)

    def _learn_from_stream(self) -> None:
        tail = self._usage.event if self._usage is not None else self._tail[0] + self._tail[1]
        if self._lease.prefill is None and (cached := self.dialect.cached_tokens(tail)) is not None:
            self._lease.cached(cached)
        self.made = self.dialect.made_tokens(tail)
        if self._is_estimate:
            self.prompt_tokens = self.dialect.prompt_tokens(tail)
        if self.first_byte_at is not None and not self._was_paused and self.made is not None:
            self._lease.answered(self.made, self._last_at - self.first_byte_at)

    def _finish(self, outcome: Outcome) -> None:
        """Exactly once: the outcome, the end of what still runs, the counts."""
        if self._over:
            return
        self._over = True
        self._pool.alarms.drop(self._alarm)
        if self._left is not None:
            outcome = Outcome(gone=True)
            self._left.set_result(None)
        if outcome.failure is not None and outcome.failure.error.code == CODE_STALE_WORKER:
            for leg in self._lease.legs():  # either may say so of the other
                self._lease.desk.suspect(leg.worker, outcome.failure.error.message)
        complete = outcome.answer is not None or (outcome.streamed and not outcome.gone and not self._serving.open)
        self._end_legs(abort=not complete)
        if self._hand_over is not None and (freer := self._freer()) is not None and (parts := self._hand_over.release(freer)) is not None:
            self._aborter.send(freer, parts)
        if outcome.failure is None and not outcome.gone:
            self._lease.praise()
        self._lease.release()
        for sink in self._sinks:
            sink.leave()
        self._tell(outcome)

    def _tell(self, outcome: Outcome) -> None:
        """Once: whoever waits hears it."""
        exchange, then = self._exchange, self._then
        if then is not None:
            self._then = None
            exchange.on_gone = exchange.on_pause = exchange.on_resume = None
            then(outcome)

    def _freer(self) -> WorkerView | None:
        """Who can free what the prefill holds for a serving leg that failed: its worker when that has answered, else another like it."""
        worker = self._serving.leg.worker
        failure = next((f for f in self._failures if f.worker is worker), None)
        if failure is None or failure.answer is not None:
            return None if failure is None else worker
        service = self._lease.desk.table.services.get(worker.service)
        like = (worker.record.engine, worker.record.role, worker.record.revision)
        others = service.workers if service is not None else []
        return next((w for w in others if w is not worker and w.routable and (w.record.engine, w.record.role, w.record.revision) == like), None)

    def _end_legs(self, *, abort: bool) -> None:
        for sink in self._sinks:
            was_open, sink.open = sink.open, False
            if was_open and sink.handle is not None:
                sink.handle.close()
            if abort and was_open:
                self._aborter.abort(sink.leg.worker, self.rid)
