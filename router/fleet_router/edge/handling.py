"""One request that workers answer: its prompt, its lease, its attempts, its answer. No task: it goes on when something calls back.

All of it up to the bytes to the worker is done in the turn of the loop in which the body is complete, when no worker has to be waited for and
the prompt is no work for a thread. What has to wait without being called back has a task for that long. Retry happens here: only before
the client's first byte, elsewhere or in a new room, never for a 4xx.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

from fleet_contract import errors as contract_errors
from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_router import errors
from fleet_router.api.body import LongPrompt, Parsed, Prompt, begin_prompt
from fleet_router.api.dialects import OLLAMA, OPENAI
from fleet_router.api.paths import PATHS, Kind
from fleet_router.decide.retry import RetryBudget
from fleet_router.desk import ComingLease, Desk, Lease, Turn, Want
from fleet_router.edge import local
from fleet_router.edge.callers import Caller
from fleet_router.edge.encoders import Encoders
from fleet_router.edge.relay import CODE_TRANSFER_FAILED, Aborter, Attempt, Failure, Outcome, Timing
from fleet_router.edge.running import Running
from fleet_router.edge.token_rates import TokenRates
from fleet_router.edge.traces import Span
from fleet_router.http.client import Pool
from fleet_router.http.exchange import Exchange
from fleet_router.settings import Settings
from fleet_router.table import Service, WorkerView
from fleet_text.ollama_chat import LATEST

log = logging.getLogger(__name__)

_ANY: Final = Kind.ANY  # a member of an enum is looked up each time
_EMBED: Final = Kind.EMBED
_GENERATE: Final = Kind.GENERATE
MAX_ATTEMPTS: Final = 2  # of a request that a worker took
MAX_UNDELIVERED: Final = 3  # further tries when no worker took it
_STATUSES: Final = {n: f"{n}xx" for n in range(1, 10)}
_WORKER_HEADER: Final = names.HEADER_TOLD_WORKER
_HITS_HEADER: Final = names.HEADER_TOLD_HITS
_KEYS_HEADER: Final = names.HEADER_TOLD_KEYS
_QUEUE_HEADER: Final = names.HEADER_TOLD_QUEUE


class Dispatcher:
    """What all requests of an edge share, and what it knows of services and workers."""

    def __init__(self, settings: Settings, desk: Desk, encoders: Encoders, pool: Pool) -> None:
        self.settings = settings
        self.desk = desk
        self.encoders = encoders
        self.pool = pool
        self.loop = pool.loop
        self.aborter = Aborter(pool, desk.counters)
        self.running = Running()
        self.rates = TokenRates()
        self.retries = RetryBudget(settings.workers)
        self.is_debug = log.isEnabledFor(logging.DEBUG)  # asked once: logging was set up before

    def count_end(self, exchange: Exchange) -> None:
        """A request is over."""
        request = exchange.request
        path = request.path if request.path in PATHS else "other"
        self.desk.counters.add("requests_total", 1, (("path", path), ("status", _STATUSES.get(exchange.status // 100, "gone"))))

    def find(self, model: str, *, ollama: bool = False, caller: Caller | None = None) -> Service[Any]:
        """The service of a name; of no name when there is only one service. Raises 404.

        Args: ollama: its clients write a tag or leave it out. caller: who is told the names that it may use.
        """
        table = self.desk.table
        service = table.resolve(model)
        if service is None and ollama:
            service = table.resolve(model.removesuffix(LATEST))
        if service is None and not model and len(table.services) == 1:
            service = next(iter(table.services.values()))
        if service is None:
            if not model:
                raise ApiError(400, "model is missing; see GET /v1/models", code="missing_required_parameter", param="model")
            if not self.desk.synced:
                text = "this router does not know its services yet; try again, or if that lasts see why in its log"
                raise ApiError(503, text, type=contract_errors.OVERLOADED, code="not_synced", retry_after_s=1)
            raise errors.unknown_model(model, table.names if caller is None else local.names(table, caller))
        return service

    def model_revision(self, service: Service[Any], revision: str) -> str:
        """Of the revision's ready workers; asks for its tokenizer when it is not here."""
        worker: WorkerView | None = service.ready_of(revision)
        if worker is None:
            return ""
        record = worker.record
        if self.encoders.get(record.model_revision) is None:
            self.encoders.want(record, worker.host)
        return record.model_revision

    def note(self, failure: Failure) -> None:
        """Tells registry and brain what a failure says about the worker."""
        if failure.undelivered or failure.error.code in ("worker_lost", errors.CODE_WORKER_TIMEOUT):
            self.desk.suspect(failure.worker, failure.error.message)
        if failure.is_fault:
            self.desk.blame(failure.worker)

    def begin_prompt(self, parsed: Parsed, model_revision: str) -> Prompt | LongPrompt:
        """The prompt as workers of a model will see it."""
        encoder, chains = self.encoders.get(model_revision), self.encoders.chains(model_revision)
        return begin_prompt(parsed, encoder, model_revision, chains, self.rates.get(model_revision))

    def fail(self, exchange: Exchange, error: Exception) -> ApiError:
        """The border of a request: its client is told what went wrong, and the log of what nobody foresaw. Returns what was told."""
        if not isinstance(error, ApiError):
            log.error("request failed", extra={"request_id": exchange.request.request_id}, exc_info=error)
            error = ApiError(500, "the router failed on this request; its log has the cause", type=contract_errors.SERVER, code="internal")
        if exchange.started:
            exchange.cut()
        else:
            exchange.fail(error)
        return error


class Handling:
    """See the module."""

    def __init__(
        self, dispatcher: Dispatcher, parsed: Parsed, exchange: Exchange, caller: Caller, klass: str, *,
        revision: str | None = None, limit_s: float = 1e9, span: Span | None = None, on_end: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Args: revision: forced, by a probe. on_end: hears that all is over."""
        now = dispatcher.loop.time()
        self._dispatcher = dispatcher
        self._loop = dispatcher.loop
        self._desk = dispatcher.desk
        self._parsed = parsed
        self._exchange = exchange
        self._request_id = exchange.request.request_id
        self._caller = caller
        self._klass = klass
        self._revision = revision
        self._span = span
        self._on_end = on_end
        self._began = now
        self._deadline = now + min(limit_s, dispatcher.settings.first_token_timeout)  # the first token is due
        self._may_wait_s = min(limit_s, dispatcher.settings.queue_timeout)  # for a ready worker, all its waits together, without attempts
        self._waited_s = 0.0
        self._attempts = 0
        self._undelivered = 0
        self._excluded: set[WorkerView] | None = None
        self._charged: int | None = None  # tokens that the caller's limit was charged with
        self._prompts: dict[str, Prompt] = {}  # by model revision
        self._prompt: Prompt | None = None  # of the present attempt
        self._lease: Lease | None = None
        self._attempt: Attempt | None = None
        self._turn: Turn | None = None
        self._service: Service[Any] | None = None  # as the table had it when a lease was asked for
        self._asked = 0.0
        self._task: asyncio.Task[None] | None = None
        self._made: int | None = None
        self._is_over = False

    def start(self) -> None:
        """Goes as far as it gets without waiting. Raises nothing."""
        self._dispatcher.running.add(self._request_id, self)
        self._dispatcher.retries.request(self._began)
        self._go()

    def abort(self) -> bool:
        """Somebody else than the client wants its end: it hears so."""
        if self._is_over:
            return False
        if self._attempt is not None:
            self._attempt.abort(errors.aborted())
        else:
            self._stop_waiting()
            self._fail(errors.aborted())
        return True

    def client_gone(self) -> None:
        """Nobody waits for the answer."""
        if self._attempt is not None:
            self._attempt.client_gone()
        elif not self._is_over:
            self._stop_waiting()
            self._desk.counters.add("client_gone_total")
            self._end(500)

    # -- towards a lease

    def _go(self) -> None:
        try:
            self._seek()
        except Exception as e:
            self._fail(e)

    def _seek(self) -> None:
        """The service, the prompt for its revision, the choice. Raises ApiError."""
        parsed, desk, caller, d = self._parsed, self._desk, self._caller, self._dispatcher
        service = self._find_service()
        caller.check_model(parsed.model, service.key, desk.table.names)
        excluded = unfit_workers(parsed, service, self._excluded or ())
        revision = desk.choose_revision(service, excluded) if self._revision is None else self._revision
        if revision is None:
            self._wait_for_worker(service)
            return
        model_revision = d.model_revision(service, revision)
        prompt = self._prompts.get(model_revision)
        if prompt is None:
            begun = d.begin_prompt(parsed, model_revision)
            if not isinstance(begun, Prompt):
                self._wait(self._read(begun, model_revision))
                return
            prompt = self._prompts[model_revision] = begun
        now = self._loop.time()
        kind = parsed.kind
        if self._charged is None and kind is not _ANY:
            charge = prompt.tokens + (parsed.answer_tokens if kind is _GENERATE else 0)
            caller.charge(charge, now)
            self._charged = charge
        want = Want(
            service.key, prompt.tokens, parsed.answer_tokens, revision, prompt.keys, excluded,
            self._request_id, any_role=kind is _ANY, prompt_only=kind is _EMBED,
            silent=not parsed.stream, tenant=caller.tenant, klass=self._klass, size_bytes=len(parsed.body),
            key_tokens=prompt.key_tokens,
        )  # fmt: skip
        self._asked, self._prompt, self._service = now, prompt, service
        turn = desk.begin(want, max(0.001, min(d.settings.busy_timeout, self._deadline - now)))
        if turn is None:
            self._wait_for_worker(service)
        elif isinstance(turn, Turn):
            self._turn = turn
            self._exchange.on_gone = self.client_gone
            turn.coming.when_done(self._turn_came)
        else:
            self._take(turn)

    def _find_service(self) -> Service[Any]:
        return self._dispatcher.find(self._parsed.model, ollama=self._parsed.dialect is OLLAMA, caller=self._caller)

    def _turn_came(self, coming: ComingLease) -> None:
        self._turn = None
        try:
            lease = coming.result()
            if lease is not None:
                self._take(lease)
            elif (service := self._find_service()) is self._service:
                self._wait_for_worker(service)
            else:  # the table has changed since it asked: another revision may serve
                self._seek()
        except Exception as e:
            self._fail(e)

    def _wait_for_worker(self, service: Service[Any]) -> None:
        """Raises ApiError when there is nothing to wait for, or no time."""
        if service.facts.is_off:
            raise errors.scaled_to_zero(service.label)
        left = min(self._may_wait_s - self._waited_s, self._deadline - self._loop.time())
        if left <= 0:
            raise errors.no_ready_worker(service.label, self._waited_s)
        self._wait(self._change(service, left))

    async def _change(self, service: Service[Any], left_s: float) -> None:
        if self._desk.table.services.get(service.key) is not service:
            return  # it changed before this task had its turn
        began = self._loop.time()
        await self._desk.wait_change(service, left_s)
        self._waited_s += self._loop.time() - began

    async def _read(self, prompt: LongPrompt, model_revision: str) -> None:
        self._prompts[model_revision] = await asyncio.to_thread(prompt)

    def _wait(self, for_what: Coroutine[Any, Any, None]) -> None:
        """In a task; then it is sought again."""
        self._exchange.on_gone = self.client_gone
        self._task = self._loop.create_task(self._wait_and_go(for_what))

    async def _wait_and_go(self, for_what: Coroutine[Any, Any, None]) -> None:
        try:
            await for_what
        except Exception as e:
            self._task = None
            self._fail(e)
        else:
            self._task = None
            self._go()

    def _stop_waiting(self) -> None:
        self._exchange.on_gone = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._turn is not None:
            turn, self._turn = self._turn, None
            self._desk.leave(turn)

    # -- attempts

    def _take(self, lease: Lease) -> None:
        """Raises ApiError for what the lease's workers cannot do."""
        assert self._prompt is not None
        d, exchange, now = self._dispatcher, self._exchange, self._loop.time()
        if self._span is not None:
            self._span.moments.asked, self._span.moments.leased = self._asked, now
            self._span.chosen(lease)
        self._lease = lease
        timing = Timing(max(0.001, self._deadline - now), d.settings.silence_timeout, d.settings.answer_timeout)
        attempt = self._attempt = Attempt(d.pool, d.aborter, exchange, lease, timing)
        exchange.head_lines = _told(self._parsed, self._prompt, lease, self._request_id)
        try:
            attempt.start(self._parsed, self._prompt, self._attempt_over)
        except BaseException:
            self._attempt = None
            raise

    def _attempt_over(self, outcome: Outcome) -> None:
        try:
            self._judge(outcome)
        except Exception as e:
            self._fail(e)

    def _judge(self, outcome: Outcome) -> None:
        """The end, or another attempt."""
        attempt, lease, prompt, desk = self._attempt, self._lease, self._prompt, self._desk
        assert attempt is not None and lease is not None and prompt is not None
        self._attempt = None
        self._made = attempt.made
        prompt_tokens = prompt.tokens
        if attempt.prompt_tokens is not None:
            prompt_tokens = attempt.prompt_tokens
            self._dispatcher.rates.learn(lease.serving.worker.record.model_revision, prompt.text_bytes, prompt_tokens)
        if self._span is not None:
            self._span.moments.first_byte = attempt.first_byte_at or 0.0
        if self._charged is not None and (outcome.gone or outcome.failure is None):
            made = attempt.made if attempt.made is not None else attempt.events
            self._caller.settle(self._charged, prompt_tokens + (made if self._parsed.kind is _GENERATE else 0))
            self._charged = None
        if outcome.gone:
            desk.counters.add("client_gone_total")
            self._end(500)
        elif outcome.failure is not None:
            self._failed(outcome.failure, lease)
        else:
            if outcome.answer is not None:
                self._exchange.respond(outcome.answer.status, outcome.answer.body, outcome.answer.content_type)
            desk.counters.observe_first_byte((attempt.first_byte_at or self._loop.time()) - self._began)
            self._end(self._exchange.status)

    def _failed(self, failure: Failure, lease: Lease) -> None:
        self._dispatcher.note(failure)
        if not self._may_retry(failure, lease):
            self._answer_failure(failure)
            self._end(self._exchange.status)
            return
        self._desk.counters.add("retries_total", 1, (("reason", "undelivered" if failure.undelivered else "failed"),))
        facts = {"request_id": self._request_id, "worker": failure.worker.name, "reason": failure.error.message}
        log.info("attempt failed, trying again", extra=facts)
        self._go()

    def _may_retry(self, failure: Failure, lease: Lease) -> bool:
        """Decides, and excludes the worker that failed where others can serve."""
        if failure.undelivered:
            self._undelivered += 1
            return self._undelivered <= MAX_UNDELIVERED
        self._attempts += 1
        if not failure.retryable or self._attempts >= MAX_ATTEMPTS:
            return False
        service = self._desk.table.services.get(lease.serving.worker.service)
        if service is None:
            return False
        excluded = (self._excluded or set()) | {failure.worker}
        elsewhere = self._desk.choose_revision(service, excluded) is not None
        if not elsewhere and not (failure.error.code == CODE_TRANSFER_FAILED and failure.worker.routable):  # the same workers, a new room
            return False
        if not self._dispatcher.retries.take(self._loop.time()):
            self._desk.counters.add("retries_refused_total")
            return False
        if elsewhere:
            self._excluded = excluded
        return True

    def _answer_failure(self, failure: Failure) -> None:
        """The worker's own words where it had any: workers tell errors in one shape, the path's dialect is written here."""
        answer, exchange = failure.answer, self._exchange
        if answer is None or failure.error.code in errors.NOT_TO_SHOW or self._parsed.dialect is not OPENAI:
            if answer is not None and answer.retry_after is not None and answer.retry_after.isdigit():
                failure.error.retry_after_s = int(answer.retry_after)
            exchange.fail(failure.error)
            return
        extra = ((b"Retry-After", answer.retry_after),) if answer.retry_after is not None else ()
        exchange.respond(answer.status, answer.body, answer.content_type, extra)

    # -- the end

    def _fail(self, error: Exception) -> None:
        if self._lease is not None:
            self._lease.release()
        self._end(self._dispatcher.fail(self._exchange, error).status)

    def _end(self, status: int) -> None:
        """Once. Args: status: for the trace."""
        if self._is_over:
            return
        self._is_over = True
        self._exchange.on_gone = None
        self._dispatcher.running.remove(self._request_id, self)
        if self._charged is not None:  # nothing was computed, or nobody knows
            self._caller.settle(self._charged, 0)
            self._charged = None
        if self._span is not None:
            self._span.moments.ended = self._loop.time()
            self._span.end(status, self._made)
        self._dispatcher.count_end(self._exchange)
        if self._dispatcher.is_debug:
            log.debug("request done", extra={"request_id": self._request_id, "seconds": self._loop.time() - self._began})
        if self._on_end is not None:
            self._on_end()


def _told(parsed: Parsed, prompt: Prompt, lease: Lease, request_id: str) -> bytes:
    """Header lines of an answer: who gives it, what it should have cached and how that is known, how long it waited."""
    worker, waited_ms = lease.serving.worker.name, int(lease.waited_s * 1000)
    text = f"{_WORKER_HEADER}: {worker}\r\n{_HITS_HEADER}: {lease.predicted_tokens}\r\n"
    lines = f"{text}{_KEYS_HEADER}: {prompt.made_of}\r\n{_QUEUE_HEADER}: {waited_ms}\r\n".encode("latin-1", "replace")
    more = parsed.dialect.more_id_header
    return lines + b"%b: %b\r\n" % (more, request_id.encode()) if more else lines


def unfit_workers(parsed: Parsed, service: Service[Any], excluded: Collection[WorkerView]) -> Collection[WorkerView]:
    """Workers that may not be chosen: those that failed, and those without the adapter or whose engine does not have the path.

    Notes the adapter that the request names. Raises ApiError 404 when no engine has the path.
    """
    path, model = parsed.route, parsed.model
    if service.adapters:
        parsed.adapter = model if model in service.adapters else ""
        if parsed.adapter:
            excluded = {*excluded, *[w for w in service.workers if model not in w.record.adapters]}
    if not path.engines:
        return excluded
    ready = [w for w in service.workers if w.routable]
    lacking = [w for w in ready if w.record.engine not in path.engines]
    if ready and len(lacking) == len(ready):
        engines = ", ".join(sorted({w.record.engine for w in ready}))
        text = f"no worker of {service.label} serves {path.path}: its engine is {engines}, and {' or '.join(path.engines)} is needed"
        raise ApiError(404, text, type=contract_errors.NOT_FOUND, code="path_not_served")
    return {*excluded, *lacking} if lacking else excluded
