"""The data port's endpoints: vets a request, knows its caller, answers what the router knows itself, hands the rest to `handling`."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from fleet_contract import errors as contract_errors
from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_contract.worker import ProbeAnswer
from fleet_router import errors
from fleet_router.api.body import Prompt, asked_path, parse_body
from fleet_router.api.dialects import OLLAMA
from fleet_router.api.paths import COMPLETIONS, MODELS_PREFIX, OPEN, PATHS, Kind, Path, find_path
from fleet_router.desk import Desk, Want
from fleet_router.edge import local
from fleet_router.edge.access import Access
from fleet_router.edge.callers import HEADER_CLASS, Caller
from fleet_router.edge.encoders import Encoders
from fleet_router.edge.handling import Dispatcher, Handling, unfit_workers
from fleet_router.edge.trace_context import passed_on
from fleet_router.edge.traces import Traces
from fleet_router.http.client import Pool
from fleet_router.http.exchange import Exchange, HeaderLines
from fleet_router.http.head import Head
from fleet_router.http.request import Request
from fleet_router.settings import Settings

PROBE_LIMIT_S: Final = 25.0
_reserved: Final = names.HEADER_PREFIX.lower().encode()


class DataService:
    """Handler of the data port."""

    def __init__(self, settings: Settings, desk: Desk, encoders: Encoders, pool: Pool, access: Access, traces: Traces | None = None) -> None:
        self.access = access
        self.traces = traces
        self.desk = desk
        self._loop = pool.loop
        self.dispatcher = Dispatcher(settings, desk, encoders, pool)
        self.asked_at = float("-inf")  # loop time of the last request for workers that came in a drain

    def handle(self, request: Request, exchange: Exchange) -> None:
        """One request whose body is complete: answers it now, or begins to. Raises nothing."""
        try:
            if self._route(request, exchange):
                return  # workers answer it; it is counted when it is over
        except Exception as e:
            self.dispatcher.fail(exchange, e)
        self.dispatcher.count_end(exchange)

    def _route(self, request: Request, exchange: Exchange) -> bool:
        """True: workers answer it. Raises ApiError."""
        head = request.head
        if not head.vetted:
            _vet(head)
            head.vetted = True
        if head.method == "OPTIONS" and (lines := self.access.preflight(head)) is not None:
            exchange.respond(200, b"", extra=lines)
            return False
        path = find_path(head.path)
        if path is None:
            there = ", ".join(PATHS)
            raise ApiError(404, f"there is no {head.path[:200]!r} here; there is: {there}", type=contract_errors.NOT_FOUND, code="not_found")
        if head.method != path.method and (head.method != "HEAD" or path.method != "GET"):
            raise ApiError(405, f"{head.path[:200]} takes {path.method}, not {head.method}", code="method_not_allowed")
        if head.path in OPEN:
            self._answer_probe(head.path, exchange)
            return False
        caller = self.access.callers.admit(head.header(b"authorization"), head.header(b"x-api-key"))
        if path.kind is Kind.LOCAL:
            self._answer_get(head.path, caller, exchange)
            return False
        self._ask_workers(path, caller, request, exchange)
        return True

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

    def _ask_workers(self, path: Path, caller: Caller, request: Request, exchange: Exchange) -> None:
        if self.desk.draining:
            request.keep_alive = False
            self.asked_at = self._loop.time()
        klass = caller.class_of(request.header(HEADER_CLASS))
        now = self._loop.time()
        caller.count_request(now)
        parsed = parse_body(path, request.body)
        request.body = b""
        parsed.passed_on = passed_on(request.head)
        if parsed.dialect.more_id_header:
            exchange.head_lines = b"%b: %b\r\n" % (parsed.dialect.more_id_header, request.request_id.encode())
        span = None
        if self.traces is not None:
            span = self.traces.begin(path.path, request.request_id, parsed.model, parsed.passed_on, now)
            parsed.passed_on = span.headers
        Handling(self.dispatcher, parsed, exchange, caller, klass, span=span).start()

    # -- asked by the control process

    async def probe(self, namespace: str, name: str, revision: str) -> ProbeAnswer:
        """One short request through a revision, whatever its weight."""
        service = self.desk.table.services.get((namespace, name))
        if service is None:
            return ProbeAnswer(ok=False, error=f"service {namespace}/{name} is not in this router's table")
        if revision not in service.ready_units():
            return ProbeAnswer(ok=False, error=f"revision {revision} of {namespace}/{name} has no ready worker (or pair) in this router's table")
        model = next(n for n, key in self.desk.table.names.items() if key == service.key and (not namespace or "/" in n))
        body = msgspec.json.encode({"model": model, "prompt": "Hello", "max_tokens": 1, "stream": False, "temperature": 0})
        exchange = ProbeExchange()
        over = asyncio.Event()
        began = time.perf_counter()
        handling = Handling(
            self.dispatcher, parse_body(COMPLETIONS, body), exchange, Caller(), "default",
            revision=revision, limit_s=PROBE_LIMIT_S, on_end=over.set,
        )  # fmt: skip
        handling.start()
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                await over.wait()
        except TimeoutError:
            return ProbeAnswer(ok=False, error=f"no answer within {PROBE_LIMIT_S:g} s")
        finally:
            handling.client_gone()
        if exchange.status != 200:
            return ProbeAnswer(ok=False, error=exchange.error or f"the worker answered {exchange.status}")
        return ProbeAnswer(ok=True, ttft_ms=(time.perf_counter() - began) * 1000)

    async def explain(self, body: bytes, path: str = "") -> dict[str, Any]:
        """The decision for a request body, made by the same code, without sending or counting anything.

        Args: path: that it would be sent to; without one the body's fields tell it.
        """
        parsed = parse_body(asked_path(path, body), body)
        service = self.dispatcher.find(parsed.model, ollama=parsed.dialect is OLLAMA)
        excluded = unfit_workers(parsed, service, ())
        revision = self.desk.choose_revision(service, excluded)
        if revision is None:
            raise errors.no_ready_worker(service.label, 0)
        begun = self.dispatcher.begin_prompt(parsed, self.dispatcher.model_revision(service, revision))
        prompt = begun if isinstance(begun, Prompt) else await asyncio.to_thread(begun)
        want = Want(
            service.key, prompt.tokens, parsed.answer_tokens, revision, prompt.keys, excluded,
            any_role=parsed.kind is Kind.ANY, prompt_only=parsed.kind is Kind.EMBED, key_tokens=prompt.key_tokens,
        )  # fmt: skip
        decision = await self.desk.explain(want)
        if decision is None:
            raise errors.no_ready_worker(service.label, 0)
        return {"path": parsed.path, **decision, "tokenized": prompt.ids is not None}


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


class ProbeExchange(Exchange):
    """Where a probe's answer goes: its client never leaves."""

    def __init__(self) -> None:
        super().__init__(Request(Head("POST", COMPLETIONS.path, [], "1.1", True), True, f"probe-{time.monotonic_ns():x}"))
        self.error = ""

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: HeaderLines = ()) -> None:
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
