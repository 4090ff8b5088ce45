"""One attempt at a request: sends its legs, merges what comes back, streams the answer's bytes unchanged, ends everything with it.

Called by `service` with a lease; never retries itself, but says whether another attempt may. A stream is passed on in whole
events only, so that an error event can always follow what the client has; bytes are never changed. Callbacks on the event loop, no
task per leg.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from fleet_contract import names
from fleet_contract.errors import CODE_STALE_WORKER, DERIVED_CODES, ApiError
from fleet_contract.wire import RoutedHeaders
from fleet_contract.worker import AbortRequest, PrefillAnswer
from fleet_router import errors
from fleet_router.body import Parsed, Prompt
from fleet_router.dialects import OPENAI
from fleet_router.http_client import Handle, Pool, fetch, request_parts
from fleet_router.http_server import Exchange
from fleet_router.lease import Lease, Leg
from fleet_router.metrics import Counters
from fleet_router.table import WorkerView

log = logging.getLogger(__name__)

PEER_CAUSE_S: Final = 0.1  # a derived error waits so long for the other leg's own
DEADLINE_GRACE_S: Final = 1.0  # the worker's own deadline answer comes first
MAX_HELD_BYTES: Final = 64 << 10  # of one unfinished event
MAX_ANSWER_BYTES: Final = 64 << 20  # of an answer that is no stream
ABORT_TIMEOUT_S: Final = 2.0
CODE_TRANSFER_FAILED: Final = "transfer_failed"
NOT_TAKEN: Final = ("worker_unreachable", CODE_STALE_WORKER, "worker_restarting", "loading")  # the worker never had the request


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of one attempt."""

    first_token_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. `streamed`: the client has bytes of it. Else exactly one of `answer` and `failure` is set, or the client is gone."""

    streamed: bool = False
    gone: bool = False
    answer: Answer | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of a worker, passed on as it is."""

    status: int
    content_type: bytes
    body: bytes
    retry_after: bytes | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed, and which worker said so. `answer` is the worker's own words, when it had any."""

    error: ApiError
    worker: WorkerView
    answer: Answer | None = None

    @property
    def derived(self) -> bool:
        return self.error.code in DERIVED_CODES

    @property
    def undelivered(self) -> bool:
        """The worker never took the request."""
        return self.error.code in NOT_TAKEN

    @property
    def retryable(self) -> bool:
        """Another attempt can help and cannot do the work twice."""
        return self.undelivered or self.error.status in (502, 503) or self.error.code == CODE_TRANSFER_FAILED

    @property
    def is_fault(self) -> bool:
        """The worker itself is to blame: never for 4xx or a busy worker."""
        return self.error.code in ("worker_unreachable", "worker_lost", "worker_timeout", "bad_worker_answer") or self.error.status == 500


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """The failure to report: the first that is not derived from another leg's; None when all are."""
    return next((f for f in failures if not f.derived), None)


class Aborter:
    """Tells workers that a request is gone; owns the calls until they are answered."""

    def __init__(self, pool: Pool, count: Counters) -> None:
        self._pool = pool
        self._count = count
        self._tasks: set[asyncio.Task[None]] = set()

    def abort(self, worker: WorkerView, rid: str) -> None:
        """Returns at once; tried twice."""
        task = asyncio.get_running_loop().create_task(self._call(worker, rid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Waits for the calls under way."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=ABORT_TIMEOUT_S)

    async def _call(self, worker: WorkerView, rid: str) -> None:
        self._count.add("aborts_total")
        body = msgspec.json.encode(AbortRequest(rid))
        for _ in range(2):
            try:
                await fetch(self._pool, worker.host, worker.port, "POST", "/abort_request", body=body, timeout_s=ABORT_TIMEOUT_S)
                return
            except ApiError as e:
                log.debug("abort call failed", extra={"worker": worker.name, "rid": rid, "reason": e.message})


class _LegSink:
    """One leg's answer."""

    def __init__(self, attempt: Attempt, leg: Leg, serving: bool) -> None:
        self.attempt = attempt
        self.leg = leg
        self.serving = serving
        self.handle: Handle | None = None
        self.status = 0
        self.content_type = b"application/json"
        self.retry_after: bytes | None = None
        self.streaming = False
        self.open = True
        self.body = bytearray()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        for name, value in headers:
            lower = name.lower()
            if lower == b"content-type":
                self.content_type = value
            elif lower == b"retry-after":
                self.retry_after = value
        self.streaming = self.serving and status == 200 and self.attempt.dialect.is_stream(self.content_type)

    def on_body(self, data: bytes) -> None:
        if self.streaming:
            self.attempt.on_stream(data)
            return
        self.body += data
        if len(self.body) > MAX_ANSWER_BYTES:
            self.open = False
            if self.handle is not None:
                self.handle.close()
            text = f"worker {self.leg.worker.name} sent an answer of more than {MAX_ANSWER_BYTES} bytes"
            self.attempt.on_failure(self, Failure(ApiError(502, text, type="server_error", code="bad_worker_answer"), self.leg.worker))

    def on_end(self) -> None:
        self.open = False
        if self.streaming:
            self.attempt.on_stream_end(None)
        elif self.status < 300:
            self.attempt.on_answer(self, self.answer())
        else:
            self.attempt.on_failure(self, Failure(ApiError.from_body(self.status, bytes(self.body)), self.leg.worker, self.answer()))

    def on_lost(self, error: ApiError) -> None:
        self.open = False
        if self.streaming and self.attempt.streamed:
            self.attempt.on_stream_end(error)
        else:
            self.attempt.on_failure(self, Failure(error, self.leg.worker))

    def answer(self) -> Answer:
        return Answer(self.status, self.content_type, bytes(self.body), self.retry_after)


class Attempt:
    """See the module. `run` gives the outcome; by then every leg is ended and every count given back."""

    def __init__(self, pool: Pool, aborter: Aborter, exchange: Exchange, lease: Lease, timing: Timing) -> None:
        self.streamed = False
        self.dialect = OPENAI  # of the request's path, see `run`
        self.events = 0  # of the stream, as far as it was passed on
        self.made: int | None = None  # tokens of the answer, as its end told them
        self._pool = pool
        self._aborter = aborter
        self._exchange = exchange
        self._lease = lease
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._sinks: list[_LegSink] = []
        self._failures: list[Failure] = []
        self._timer: asyncio.TimerHandle | None = None
        self._held = b""
        self._mid_event = False
        self._tail: tuple[bytes, bytes] = (b"", b"")
        self._last_at = 0.0
        self._was_paused = False  # the client was slow: times say nothing about the worker
        self.first_byte_at: float | None = None  # loop time
        self.rid = secrets.token_hex(16)

    async def run(self, parsed: Parsed, prompt: Prompt) -> Outcome:
        """Sends the legs and waits for the end. Cancelled: ends the legs first."""
        exchange = self._exchange
        self.dialect = parsed.dialect
        if exchange.gone:
            self._lease.release()
            return Outcome(gone=True)
        exchange.on_gone, exchange.on_pause, exchange.on_resume = self._client_gone, self._pause, self._resume
        try:
            self._timer = self._loop.call_later(self._timing.first_token_s + DEADLINE_GRACE_S, self._late)
            self._send(parsed, prompt)
            return await self._outcome
        finally:
            exchange.on_gone = exchange.on_pause = exchange.on_resume = None
            if not self._outcome.done() or self._outcome.cancelled():
                self._end_legs(abort=True)
            if self._timer is not None:
                self._timer.cancel()
            self._lease.release()

    # -- from the legs

    def on_stream(self, data: bytes) -> None:
        """Bytes of the serving leg's stream."""
        if self._held:
            data = self._held + data
        end = self.dialect.event_end(data)
        if end:
            self._held = data[end:]
            self._forward(data[:end] if self._held else data, mid_event=False)
        elif len(data) > MAX_HELD_BYTES or self._mid_event:
            self._held = b""
            self._forward(data, mid_event=True)
        else:
            self._held = data

    def on_stream_end(self, error: ApiError | None) -> None:
        """The serving leg's stream is over; without an error it ended as HTTP says, but may still lack its last event."""
        if self._outcome.done():
            return
        ended, failed = self.dialect.last_words(self._tail[1])
        if not self.streamed:
            worker = self._lease.serving.worker
            lost = error or errors.worker_lost(worker.name, "the stream was empty")
            self.on_failure(self._sinks[-1], Failure(lost, worker))
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
        if not sink.serving:
            try:
                said = msgspec.json.decode(answer.body, type=PrefillAnswer)
                self._lease.cached(said.cached_tokens)
            except msgspec.DecodeError:
                pass
            self._lease.first_token()
            self._lease.release_leg(sink.leg)
            return
        if self._lease.prefill is None and (cached := self.dialect.cached_tokens(answer.body)) is not None:
            self._lease.cached(cached)
        self.made = self.dialect.made_tokens(answer.body)
        self._finish(Outcome(answer=answer))

    def on_failure(self, sink: _LegSink, failure: Failure) -> None:
        """One leg ended badly before the client had a byte of it."""
        if self._outcome.done():
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
            self._set_timer(PEER_CAUSE_S, self._no_other_cause)

    # -- from the client

    def _client_gone(self) -> None:
        self._finish(Outcome(gone=True, streamed=self.streamed))

    def abort(self, error: ApiError) -> None:
        """Somebody else than the client wants its end: it hears the error."""
        if self.streamed:
            self.on_stream_end(error)
        else:
            self._finish(Outcome(failure=Failure(error, self._lease.serving.worker)))

    def _pause(self) -> None:
        self._was_paused = True
        if (handle := self._sinks[-1].handle) is not None:
            handle.pause()

    def _resume(self) -> None:
        if (handle := self._sinks[-1].handle) is not None:
            handle.resume()

    # -- timers

    def _set_timer(self, seconds: float, then: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, then)  # type: ignore[arg-type]

    def _no_other_cause(self) -> None:
        self._finish(Outcome(failure=self._failures[0]))

    def _late(self) -> None:
        worker = self._lease.serving.worker
        error = errors.worker_timeout(worker.name, "gave no first token", self._timing.first_token_s, "--first-token-timeout of the router")
        self._finish(Outcome(failure=Failure(error, worker)))

    def _check_silence(self) -> None:
        quiet = self._loop.time() - self._last_at
        if self._exchange.paused:
            quiet = 0.0
        if quiet < self._timing.silence_s:
            self._set_timer(self._timing.silence_s - quiet, self._check_silence)
            return
        worker = self._lease.serving.worker
        self.on_stream_end(errors.worker_timeout(worker.name, "sent nothing more", self._timing.silence_s, "--silence-timeout of the router"))

    # -- inside

    def _send(self, parsed: Parsed, prompt: Prompt) -> None:
        """All legs at once."""
        lease = self._lease
        rooms = tuple(secrets.randbelow(2**63 - 1) + 1 for _ in range(prompt.choices)) if lease.prefill is not None else ()
        for leg in lease.legs():
            self._sinks.append(_LegSink(self, leg, leg is lease.serving))
        for sink in self._sinks:
            if self._outcome.done():
                return
            parts = leg_request(self, sink.leg, parsed, prompt, rooms)
            sink.handle = self._pool.start(sink.leg.worker.host, sink.leg.worker.port, parts, sink)

    def routed_headers(self, leg: Leg, rooms: tuple[int, ...]) -> list[tuple[str, str]]:
        """What the router tells a worker beside the client's request."""
        prefill = self._lease.prefill
        return RoutedHeaders(
            rid=self.rid,
            pick=(self._lease.pick_id, leg.pick_number),
            deadline_ms=max(1, int(self._timing.first_token_s * 1000)),
            leg=None if prefill is None else names.ROLE_PREFILL if leg is prefill else names.ROLE_DECODE,
            rooms=rooms,
            bootstrap=None if prefill is None else f"{prefill.worker.host}:{prefill.worker.record.ports.bootstrap}",
            prefill_incarnation=None if prefill is None else prefill.worker.record.incarnation,
        ).items()

    @property
    def request_id(self) -> str:
        return self._exchange.request.request_id

    def _forward(self, data: bytes, *, mid_event: bool) -> None:
        if not self.streamed:
            self.streamed = True
            self.first_byte_at = self._loop.time()
            self._lease.first_token()
            self._exchange.start_stream(self._sinks[-1].content_type)
            self._set_timer(self._timing.silence_s, self._check_silence)
        self._mid_event = mid_event
        self._last_at = self._loop.time()
        self._tail = (self._tail[1], data)
        self.events += self.dialect.events(data)
        self._exchange.write(data)

    def _learn_from_stream(self) -> None:
        tail = self._tail[0][-4096:] + self._tail[1][-4096:]
        if self._lease.prefill is None and (cached := self.dialect.cached_tokens(tail)) is not None:
            self._lease.cached(cached)
        self.made = self.dialect.made_tokens(tail)
        if self.first_byte_at is not None and not self._was_paused and self.made is not None:
            self._lease.answered(self.made, self._last_at - self.first_byte_at)

    def _finish(self, outcome: Outcome) -> None:
        """Exactly once: the outcome, the end of what still runs, the counts."""
        if self._outcome.done():
            return
        self._outcome.set_result(outcome)
        complete = outcome.answer is not None or (outcome.streamed and not outcome.gone and not self._sinks[-1].open)
        self._end_legs(abort=not complete)
        self._lease.release()

    def _end_legs(self, *, abort: bool) -> None:
        for sink in self._sinks:
            was_open, sink.open = sink.open, False
            if was_open and sink.handle is not None:
                sink.handle.close()
            if abort and was_open:
                self._aborter.abort(sink.leg.worker, self.rid)


def leg_request(attempt: Attempt, leg: Leg, parsed: Parsed, prompt: Prompt, rooms: tuple[int, ...]) -> tuple[bytes, ...]:
    """The bytes for one leg: the client's JSON, with token ids behind it when we have them."""
    headers = [(names.HEADER_REQUEST_ID, attempt.request_id), *parsed.passed_on, *attempt.routed_headers(leg, rooms)]
    body, content_type = parsed.body, "application/json"
    if prompt.ids is not None:
        headers += [(names.HEADER_JSON_LENGTH, str(len(body))), (names.HEADER_MODEL_REVISION, leg.worker.record.model_revision)]
        body, content_type = body + prompt.ids, names.CONTENT_TYPE_IDS
    return request_parts(leg.worker.host, leg.worker.port, "POST", parsed.path, headers, body, content_type)
