"""The data port's endpoints: reads a request, finds its service, gets leases, runs attempts, answers. One coroutine per request.

Retry happens here: only before the client's first byte, elsewhere or in a new room, never for a 4xx.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from fleet_contract import errors as contract_errors
from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_contract.worker import ProbeAnswer
from fleet_router import errors
from fleet_router.api.body import Parsed, Prompt, parse_body, read_prompt
from fleet_router.api.dialects import OLLAMA, OPENAI
from fleet_router.api.paths import CHAT, COMPLETIONS, MODELS_PREFIX, OPEN, PATHS, Kind, Path, find_path
from fleet_router.decide.retry import RetryBudget
from fleet_router.desk import Desk
from fleet_router.edge import local
from fleet_router.edge.access import Access
from fleet_router.edge.callers import HEADER_CLASS, Caller
from fleet_router.edge.encoders import Encoders
from fleet_router.edge.relay import CODE_TRANSFER_FAILED, Aborter, Attempt, Failure, Outcome, Timing
from fleet_router.edge.running import Running, RunningOne
from fleet_router.edge.token_rates import TokenRates
from fleet_router.edge.trace_context import passed_on
from fleet_router.edge.traces import Span, Traces
from fleet_router.http.client import Pool
from fleet_router.http.head import Head
from fleet_router.http.request import Request
from fleet_router.http.server import Exchange
from fleet_router.lease import Lease, Want
from fleet_router.settings import Settings
from fleet_router.table import Service, WorkerView
from fleet_text.ollama_chat import LATEST

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2  # of a request that a worker took
MAX_UNDELIVERED: Final = 3  # further tries when no worker took it
PROBE_LIMIT_S: Final = 25.0
_TOLD: Final = (
    f"{names.HEADER_TOLD_WORKER}: %b\r\n{names.HEADER_TOLD_HITS}: %d\r\n{names.HEADER_TOLD_KEYS}: %b\r\n{names.HEADER_TOLD_QUEUE}: %d\r\n".encode()
)
_reserved: Final = names.HEADER_PREFIX.lower().encode()


@dataclass(slots=True)
class Trail:
    """What happened to one request so far."""

    deadline: float  # loop time: the first token is due
    wait_until: float  # loop time: it may wait for a worker until then
    attempts: int = 0
    undelivered: int = 0
    excluded: set[WorkerView] | None = None
    revision: str | None = None  # forced, by a probe
    caller: Caller = field(default_factory=Caller)
    klass: str = "default"
    span: Span | None = None
    made: int | None = None  # tokens of the answer, if it told them
    charged: int | None = None  # tokens that the caller's limit was charged with


class DataService:
    """Handler of the data port."""

    def __init__(self, settings: Settings, desk: Desk, encoders: Encoders, pool: Pool, access: Access, traces: Traces | None = None) -> None:
        self.settings = settings
        self.access = access
        self.traces = traces
        self.desk = desk
        self.encoders = encoders
        self.pool = pool
        self._loop = pool.loop
        self.aborter = Aborter(pool, desk.counters)
        self.running = Running()
        self.rates = TokenRates()
        self.retries = RetryBudget(settings.workers)

    async def handle(self, request: Request, exchange: Exchange) -> None:
        """One request, from its last byte to the end of its answer."""
        started = time.perf_counter()
        try:
            await self._route(request, exchange)
        except ApiError as e:
            if exchange.started:
                exchange.cut()
            else:
                exchange.fail(e)
        path = request.path if request.path in PATHS else "other"
        self.desk.counters.add("requests_total", path=path, status=f"{exchange.status // 100}xx" if exchange.status else "gone")
        if exchange.status == 200 and request.method == "POST":
            log.debug("request done", extra={"request_id": request.request_id, "seconds": time.perf_counter() - started})

    async def _route(self, request: Request, exchange: Exchange) -> None:
        head = request.head
        if not head.vetted:
            _vet(head)
            head.vetted = True
        if head.method == "OPTIONS" and (lines := self.access.preflight(head)) is not None:
            exchange.respond(200, b"", extra=lines)
            return
        path = find_path(head.path)
        if path is None:
            there = ", ".join(PATHS)
            raise ApiError(404, f"there is no {head.path[:200]!r} here; there is: {there}", type=contract_errors.NOT_FOUND, code="not_found")
        if head.method != path.method and (head.method != "HEAD" or path.method != "GET"):
            raise ApiError(405, f"{head.path[:200]} takes {path.method}, not {head.method}", code="method_not_allowed")
        if head.path in OPEN:
            self._answer_probe(head.path, exchange)
            return
        caller = self.access.callers.admit(head.header(b"authorization"), head.header(b"x-api-key"))
        if path.kind is Kind.LOCAL:
            self._answer_get(head.path, caller, exchange)
        else:
            await self._ask_workers(path, caller, request, exchange)

    def _answer_probe(self, path: str, exchange: Exchange) -> None:
        if path == "/livez":
            exchange.respond(200, b'{"status":"ok"}')
        else:
            ready = self.desk.synced and not self.desk.draining
            exchange.respond(200 if ready else 503, msgspec.json.encode(self.readiness()))

    def _answer_get(self, path: str, caller: Caller, exchange: Exchange) -> None:
        table = self.desk.table
        if path == "/v1/models":
            told: Any = {"object": "list", "data": local.models(table, caller)}
        elif path == "/api/tags":
            told = {"models": local.ollama_tags(table, caller)}
        elif path == "/api/ps":
            told = {"models": local.ollama_running(table, caller)}
        elif path == "/api/version":
            told = {"version": local.VERSION}
        else:
            wanted = unquote(path.removeprefix(MODELS_PREFIX))
            models = local.models(table, caller)
            told = next((m for m in models if m["id"] == wanted), None)
            if told is None:
                raise errors.unknown_model(wanted, [m["id"] for m in models])
        exchange.respond(200, msgspec.json.encode(told))

    def readiness(self) -> dict[str, Any]:
        """Body of /readyz."""
        desk = self.desk
        state = "draining" if desk.draining else "syncing" if not desk.synced else "degraded" if desk.degraded else "ready"
        body: dict[str, Any] = {"status": state, "synced": desk.synced, "draining": desk.draining}
        return body | {"detail": desk.degraded} if desk.degraded else body

    # -- what workers answer

    async def _ask_workers(self, path: Path, caller: Caller, request: Request, exchange: Exchange) -> None:
        if self.desk.draining:
            request.keep_alive = False
        klass = caller.class_of(request.header(HEADER_CLASS))
        now = self._loop.time()
        caller.count_request(now)
        parsed = parse_body(path, request.body)
        request.body = b""
        parsed.passed_on = passed_on(request.head)
        trail = self._trail()
        trail.caller, trail.klass = caller, klass
        if parsed.dialect.more_id_header:
            exchange.head_lines = b"%b: %b\r\n" % (parsed.dialect.more_id_header, request.request_id.encode())
        if self.traces is None:
            await self.serve(parsed, exchange, trail)
            return
        trail.span = self.traces.begin(path.path, request.request_id, parsed.model, parsed.passed_on, now)
        parsed.passed_on = trail.span.headers
        status = 500
        try:
            await self.serve(parsed, exchange, trail)
            status = exchange.status
        except ApiError as e:
            status = e.status
            raise
        finally:
            trail.span.moments.ended = asyncio.get_running_loop().time()
            trail.span.end(status, trail.made)

    def _trail(self, limit_s: float = 1e9) -> Trail:
        now = self._loop.time()
        return Trail(now + min(limit_s, self.settings.first_token_timeout), now + min(limit_s, self.settings.queue_timeout))

    async def serve(self, parsed: Parsed, exchange: Exchange, trail: Trail) -> None:
        """Attempts until the client has an answer. Raises ApiError for what could not be served."""
        try:
            with self.running.request(exchange.request.request_id) as one:
                await self._attempts(parsed, exchange, trail, one)
        finally:
            if trail.charged is not None:  # nothing was computed, or nobody knows
                trail.caller.settle(trail.charged, 0)

    async def _attempts(self, parsed: Parsed, exchange: Exchange, trail: Trail, one: RunningOne) -> None:
        loop = self._loop
        began = loop.time()
        prompts: dict[str, Prompt] = {}
        self.retries.request(began)
        while True:
            lease, prompt = await self._lease(parsed, exchange, trail, prompts)
            with lease:
                left = max(0.001, trail.deadline - loop.time())
                attempt = Attempt(self.pool, self.aborter, exchange, lease, Timing(left, self.settings.silence_timeout, self.settings.answer_timeout))
                exchange.head_lines = _told(parsed, prompt, lease, exchange.request.request_id)
                one.attempt = attempt
                outcome = await attempt.run(parsed, prompt)
                one.attempt = None
            trail.made = attempt.made
            prompt_tokens = prompt.tokens
            if attempt.prompt_tokens is not None:
                prompt_tokens = attempt.prompt_tokens
                self.rates.learn(lease.serving.worker.record.model_revision, prompt.text_bytes, prompt_tokens)
            if trail.span is not None:
                trail.span.moments.first_byte = attempt.first_byte_at or 0.0
            if trail.charged is not None and (outcome.gone or outcome.failure is None):
                made = attempt.made if attempt.made is not None else attempt.events
                trail.caller.settle(trail.charged, prompt_tokens + (made if parsed.kind is Kind.GENERATE else 0))
                trail.charged = None
            if outcome.gone:
                self.desk.counters.add("client_gone_total")
                return
            if outcome.failure is not None:
                failure = outcome.failure
                self._note(failure)
                if self._may_retry(failure, lease, trail):
                    self.desk.counters.add("retries_total", reason="undelivered" if failure.undelivered else "failed")
                    facts = {"request_id": exchange.request.request_id, "worker": failure.worker.name, "reason": failure.error.message}
                    log.info("attempt failed, trying again", extra=facts)
                    continue
                self._answer_failure(failure, parsed, exchange)
                return
            self._answer(outcome, lease, exchange)
            self.desk.counters.observe_first_byte((attempt.first_byte_at or loop.time()) - began)
            return

    async def _lease(self, parsed: Parsed, exchange: Exchange, trail: Trail, prompts: dict[str, Prompt]) -> tuple[Lease, Prompt]:
        """Waits for a service with ready workers, reads the prompt for its revision, and picks."""
        loop = self._loop
        began = loop.time()
        while True:
            service = self.find(parsed.model, ollama=parsed.dialect is OLLAMA, caller=trail.caller)
            trail.caller.check_model(parsed.model, service.facts.key, self.desk.table.names)
            excluded = _excluded(parsed.route, service, trail.excluded or ())
            revision = self.desk.choose_revision(service, excluded) if trail.revision is None else trail.revision
            if revision is not None:
                model_revision = self._model_revision(service, revision)
                prompt = prompts.get(model_revision)
                if prompt is None:
                    prompt = prompts[model_revision] = await self._read(parsed, model_revision)
                if trail.charged is None and parsed.kind is not Kind.ANY:
                    charge = prompt.tokens + (parsed.answer_tokens if parsed.kind is Kind.GENERATE else 0)
                    trail.caller.charge(charge, loop.time())
                    trail.charged = charge
                want = Want(
                    service.facts.key, prompt.tokens, parsed.answer_tokens, revision, prompt.keys, excluded,
                    exchange.request.request_id, any_role=parsed.kind is Kind.ANY, prompt_only=parsed.kind is Kind.EMBED,
                    silent=not parsed.stream, tenant=trail.caller.tenant, klass=trail.klass, size_bytes=len(parsed.body),
                    key_tokens=prompt.key_tokens,
                )  # fmt: skip
                asked = loop.time()
                lease = await self.desk.acquire(want, max(0.001, min(self.settings.busy_timeout, trail.deadline - loop.time())))
                if lease is not None:
                    if trail.span is not None:
                        trail.span.moments.asked, trail.span.moments.leased = asked, loop.time()
                        trail.span.chosen(lease)
                    return lease, prompt
            if service.facts.is_off:
                raise errors.scaled_to_zero(service.label)
            left = trail.wait_until - loop.time()
            if left <= 0:
                raise errors.no_ready_worker(service.label, loop.time() - began)
            await self.desk.wait_change(service, left)

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

    def _model_revision(self, service: Service[Any], revision: str) -> str:
        """Of the revision's ready workers; asks for its tokenizer when it is not here."""
        for w in service.workers:
            if w.routable and w.record.revision == revision:
                self.encoders.want(w.record, w.host)
                return str(w.record.model_revision)
        return ""

    async def _read(self, parsed: Parsed, model_revision: str) -> Prompt:
        """The prompt as workers of a model will see it."""
        encoder, chains = self.encoders.get(model_revision), self.encoders.chains(model_revision)
        return await read_prompt(parsed, encoder, model_revision, chains, self.rates.get(model_revision))

    def _note(self, failure: Failure) -> None:
        """Tells registry and brain what a failure says about the worker."""
        if failure.undelivered or failure.error.code in ("worker_lost", errors.CODE_WORKER_TIMEOUT):
            self.desk.suspect(failure.worker, failure.error.message)
        if failure.is_fault:
            self.desk.blame(failure.worker)

    def _may_retry(self, failure: Failure, lease: Lease, trail: Trail) -> bool:
        """Decides, and excludes the worker that failed where others can serve."""
        if failure.undelivered:
            trail.undelivered += 1
            return trail.undelivered <= MAX_UNDELIVERED
        trail.attempts += 1
        if not failure.retryable or trail.attempts >= MAX_ATTEMPTS:
            return False
        service = self.desk.table.services.get(lease.serving.worker.service)
        if service is None:
            return False
        excluded = (trail.excluded or set()) | {failure.worker}
        elsewhere = self.desk.choose_revision(service, excluded) is not None
        if not elsewhere and not (failure.error.code == CODE_TRANSFER_FAILED and failure.worker.routable):  # the same workers, a new room
            return False
        if not self.retries.take(self._loop.time()):
            self.desk.counters.add("retries_refused_total")
            return False
        if elsewhere:
            trail.excluded = excluded
        return True

    def _answer(self, outcome: Outcome, lease: Lease, exchange: Exchange) -> None:
        for leg in lease.legs():
            self.desk.praise(leg.worker)
        if outcome.answer is not None:
            exchange.respond(outcome.answer.status, outcome.answer.body, outcome.answer.content_type)

    @staticmethod
    def _answer_failure(failure: Failure, parsed: Parsed, exchange: Exchange) -> None:
        """The worker's own words where it had any: workers tell errors in one shape, the path's dialect is written here."""
        answer = failure.answer
        if answer is None or failure.error.code == "bad_worker_answer" or parsed.dialect is not OPENAI:
            if answer is not None and answer.retry_after is not None and answer.retry_after.isdigit():
                failure.error.retry_after_s = int(answer.retry_after)
            exchange.fail(failure.error)
            return
        extra = ((b"Retry-After", answer.retry_after),) if answer.retry_after is not None else ()
        exchange.respond(answer.status, answer.body, answer.content_type, extra)

    # -- asked by the control process

    async def probe(self, namespace: str, name: str, revision: str) -> ProbeAnswer:
        """One short request through a revision, whatever its weight."""
        service = self.desk.table.services.get((namespace, name))
        if service is None:
            return ProbeAnswer(ok=False, error=f"service {namespace}/{name} is not in this router's table")
        if revision not in service.ready_units():
            return ProbeAnswer(ok=False, error=f"revision {revision} of {namespace}/{name} has no ready worker (or pair) in this router's table")
        model = next(n for n, key in self.desk.table.names.items() if key == service.facts.key and (not namespace or "/" in n))
        body = msgspec.json.encode({"model": model, "prompt": "Hello", "max_tokens": 1, "stream": False, "temperature": 0})
        exchange = ProbeExchange()
        trail = self._trail(PROBE_LIMIT_S)
        trail.revision = revision
        began = time.perf_counter()
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                await self.serve(parse_body(COMPLETIONS, body), exchange, trail)  # type: ignore[arg-type]
        except ApiError as e:
            return ProbeAnswer(ok=False, error=e.message)
        except TimeoutError:
            return ProbeAnswer(ok=False, error=f"no answer within {PROBE_LIMIT_S:g} s")
        if exchange.status != 200:
            return ProbeAnswer(ok=False, error=exchange.error or f"the worker answered {exchange.status}")
        return ProbeAnswer(ok=True, ttft_ms=(time.perf_counter() - began) * 1000)

    async def explain(self, body: bytes) -> dict[str, Any]:
        """The decision for a request body, made by the same code, without sending or counting anything."""
        parsed = parse_body(CHAT if b'"messages"' in body else COMPLETIONS, body)
        service = self.find(parsed.model)
        revision = self.desk.choose_revision(service)
        if revision is None:
            raise errors.no_ready_worker(service.label, 0)
        model_revision = self._model_revision(service, revision)
        prompt = await self._read(parsed, model_revision)
        want = Want(service.facts.key, prompt.tokens, parsed.answer_tokens, revision, prompt.keys, key_tokens=prompt.key_tokens)
        decision = await self.desk.explain(want)
        if decision is None:
            raise errors.no_ready_worker(service.label, 0)
        return {**decision, "tokenized": prompt.ids is not None}


def _told(parsed: Parsed, prompt: Prompt, lease: Lease, request_id: str) -> bytes:
    """Header lines of an answer: who gives it, what it should have cached and how that is known, how long it waited."""
    lines = _TOLD % (
        lease.serving.worker.name.encode("latin-1", "replace"), lease.predicted_tokens, prompt.made_of.encode(),
        lease.waited_s * 1000,
    )  # fmt: skip
    more = parsed.dialect.more_id_header
    return lines + b"%b: %b\r\n" % (more, request_id.encode()) if more else lines


def _excluded(path: Path, service: Service[Any], excluded: Collection[WorkerView]) -> Collection[WorkerView]:
    """Workers that may not be chosen: those that failed, and those whose engine does not have the path. Raises ApiError 404 when none has it."""
    if not path.engines:
        return excluded
    ready = [w for w in service.workers if w.routable]
    lacking = [w for w in ready if w.record.engine not in path.engines]
    if ready and len(lacking) == len(ready):
        engines = ", ".join(sorted({w.record.engine for w in ready}))
        text = f"no worker of {service.label} serves {path.path}: its engine is {engines}, and {' or '.join(path.engines)} is needed"
        raise ApiError(404, text, type=contract_errors.NOT_FOUND, code="path_not_served")
    return {*excluded, *lacking} if lacking else excluded


def _vet(head: Head) -> None:
    """What a client may not send, by its headers alone. Raises ApiError."""
    for name, _ in head.headers:
        if name.startswith(_reserved):
            text = name.decode("latin-1")
            raise ApiError(400, f"header {text[:60]} is reserved between router and workers; leave it out", code="reserved_header", param=text[:60])
    if head.method != "POST":
        return
    content_type = (head.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if content_type == names.CONTENT_TYPE_IDS.encode():
        text = f"Content-Type {names.CONTENT_TYPE_IDS} is reserved between router and workers; send application/json"
        raise ApiError(400, text, code="reserved_content_type")
    if (coding := head.header(b"content-encoding")) is not None and coding.strip().lower() != b"identity":
        text = f"Content-Encoding {coding[:40].decode('latin-1')!r} is not accepted; send the body as it is"
        raise ApiError(415, text, code="unsupported_encoding")


class ProbeExchange:
    """Where a probe's answer goes: looks like an Exchange whose client never leaves."""

    def __init__(self) -> None:
        self.request = Request(Head("POST", COMPLETIONS.path, [], "1.1", True), True, f"probe-{time.monotonic_ns():x}")
        self.started = self.ended = self.gone = self.paused = False
        self.status = 0
        self.error = ""
        self.head_lines = b""
        self.on_gone: object = None
        self.on_pause: object = None
        self.on_resume: object = None

    def respond(self, status: int, body: bytes, content_type: bytes = b"", extra: object = ()) -> None:
        self.status = status
        if status != 200:
            self.error = ApiError.from_body(status, body).message

    def fail(self, error: ApiError) -> None:
        self.status, self.error = error.status, error.message

    def start_stream(self, content_type: bytes) -> None:
        self.status = 200

    def write(self, data: bytes) -> None:
        pass

    def finish(self) -> None:
        self.ended = True

    def cut(self) -> None:
        self.status, self.error = 502, "the stream was cut"
