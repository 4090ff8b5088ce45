"""The two applications of a runtime: the public API, and the internal one (the same paths, routed requests, and control calls).

`Border` is outermost: it gives every answer its request id, counts it, keeps internal names off the public port, and turns whatever was
raised into the one error shape.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleet_contract import names
from fleet_contract.errors import CODE_ABORTED, NOT_FOUND, SERVER, ApiError
from fleet_contract.logs import facts
from fleet_contract.wire import RoutedHeaders, WireError, parse_routed_headers, split_ids_body
from fleet_contract.worker import AbortAnswer, AbortRequest
from fleet_runtime.server import validate
from fleet_runtime.server.access import OPEN_PATHS, parse_origins, with_cors
from fleet_runtime.server.body import ClientGone, parse_json, parse_object, read_body
from fleet_runtime.server.health import look, not_live, not_ready
from fleet_runtime.server.manager import ReqState
from fleet_runtime.server.request_id import accept_request_id
from fleet_runtime.server.requests import Generation, chat_generation, check_leg, completion_generation, encode_chat, encode_text, stale
from fleet_runtime.server.responses import JSON_TYPE, GenerationResponse
from fleet_runtime.server.state import HttpState

log = logging.getLogger(__name__)

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = names.HEADER_PREFIX.lower().encode()

Build = Callable[[HttpState, ReqState, dict[str, Any], list[int] | None], Awaitable[Generation]]


class Border:
    """Outermost ASGI application of one port."""

    def __init__(self, app: ASGIApp, state: HttpState, *, internal: bool) -> None:
        self._app = app
        self._state = state
        self._internal = internal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        request_id = accept_request_id(given.decode("latin-1") if given is not None else None)
        request_facts = scope["state"]
        request_facts["request_id"] = request_id
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            if not self._internal:
                if self._state.keys is not None and scope["path"] not in OPEN_PATHS:
                    self._state.keys.check(headers)
                _refuse_internal_headers(headers)
            await self._app(scope, receive, answer)
        except ApiError as e:
            await _error_response(e, request_id)(scope, receive, answer)
        except Exception:  # the request's border: it is answered already (`_on_fault`); the process and other requests go on
            log.exception("a request failed by a fault of ours", extra=facts(request_id=request_id))
        endpoint = scope["route"].path if "route" in scope else "other"
        self._state.metrics.requests[endpoint, request_facts.get("counted_status", status)] += 1


def _error_response(error: ApiError, request_id: str) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413) or error.code == "draining":
        headers["connection"] = "close"
    return Response(error.body(request_id), error.status, headers, JSON_TYPE)


def _reason(error: BaseException) -> ApiError:
    """What a leg's peer is told of a request that ended before its admission."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientGone):
        return ApiError(499, "the client closed the connection", code=CODE_ABORTED)
    return ApiError(500, f"the worker failed on this request ({type(error).__name__})", type=SERVER, code="internal")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error, request.state.request_id)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads it; it is counted."""
    return Response(status_code=499)


async def _on_fault(request: Request, error: Exception) -> Response:
    message = f"the server failed on this request ({type(error).__name__}); its log has the cause"
    return _error_response(ApiError(500, message, type=SERVER, code="internal"), request.state.request_id)


def _refuse_internal_headers(headers: dict[bytes, bytes]) -> None:
    for name in headers:
        if name.startswith(_PREFIX):
            raise ApiError(400, f"the header {name.decode('latin-1')} is internal; it is not allowed on the public port", code="internal_header")
    if headers.get(b"content-type", b"").split(b";")[0].strip().lower() == names.CONTENT_TYPE_IDS.encode():
        raise ApiError(400, f"the content type {names.CONTENT_TYPE_IDS} is not allowed on the public port", code="internal_content_type")


def create_app(state: HttpState, *, internal: bool) -> ASGIApp:
    """One port's application."""
    app = FastAPI(title="Radixfleet runtime", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_fault)
    _add_generation(app, state, internal=internal)
    _add_reading(app, state)
    if internal:
        _add_control(app, state)
    border = Border(app, state, internal=internal)
    return border if internal else with_cors(border, parse_origins(state.flags.cors_origins))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own refusals (unknown path, wrong method) in our shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow") or (error.headers or {}).get("allow") or "another method"
        refusal = ApiError(405, f"{request.method} is not allowed on {path}; use {allowed}", code="method_not_allowed")
        headers = {"allow": allowed}
    else:
        refusal, headers = ApiError(404, f"there is no {path} here; see GET /v1/models and the documentation", type=NOT_FOUND, code="not_found"), {}
    return Response(refusal.body(request.state.request_id), refusal.status, headers, JSON_TYPE)


def _add_generation(app: FastAPI, state: HttpState, *, internal: bool) -> None:
    async def generate(http: Request, build: Build) -> Response:
        """Opens, reads, checks; from then on the response owns the request."""
        routed = _routed(http) if internal else RoutedHeaders()
        request = state.manager.open(routed)
        try:
            check_leg(state, request)
            body, ids = await _read(http)
            if not internal:
                validate.refuse_bootstrap(body)
            generation = await build(state, request, body, ids)
            if request.aborted:
                raise ApiError(499, request.aborted, code=CODE_ABORTED)
        except BaseException as e:
            state.metrics.disconnects += isinstance(e, ClientGone)
            state.manager.reject(request, _reason(e))
            state.manager.release(request)
            raise
        return GenerationResponse(state, request, generation)

    async def _read(http: Request) -> tuple[dict[str, Any], list[int] | None]:
        data = await _body(http, state)
        if _media_type(http) != names.CONTENT_TYPE_IDS:
            return await parse_object(data), None
        length = http.headers.get(names.HEADER_JSON_LENGTH, "")
        if not (length.isascii() and length.isdigit()):
            raise ApiError(400, f"header {names.HEADER_JSON_LENGTH} is {length[:40]!r}; the JSON's length in bytes is needed", code="bad_wire")
        revision = http.headers.get(names.HEADER_MODEL_REVISION, "")
        if revision != state.config.model_revision:
            raise stale(f"the token ids are of model revision {revision[:40]!r}, this worker has {state.config.model_revision}")
        try:
            json_bytes, ids = split_ids_body(int(length), data)
        except WireError as e:
            raise ApiError(400, str(e), code="bad_wire") from e
        return await parse_object(json_bytes), ids

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        return await generate(http, chat_generation)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await generate(http, completion_generation)


def _add_reading(app: FastAPI, state: HttpState) -> None:
    def model(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "radixfleet"}

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model(name) for name in state.config.served_names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        validate.check_model(name, state.config.served_names)
        return _json(model(name))

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        options = validate.tokenize_request(await parse_object(await _body(http, state)))
        if options.model is not None:
            validate.check_model(options.model, state.config.served_names)
        text = state.ready_text()
        if options.messages is not None:
            ids = await encode_chat(text, options.messages)
        else:
            ids = await encode_text(text, options.prompt or "", add_special_tokens=options.add_special_tokens)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": state.flags.context_length})

    @app.get("/livez")
    async def livez() -> Response:
        return _probe(not_live(look(state.board), state.flags.stall_timeout))

    @app.get("/readyz")
    @app.get("/health")
    async def readyz() -> Response:
        return _probe(not_ready(look(state.board), state.flags.stall_timeout))

    @app.get("/metrics")
    async def metrics() -> Response:
        page = state.metrics.render(
            open_requests=len(state.manager),
            late_messages=state.manager.late + state.mailbox.dropped,
            ended=state.guard.ended,
            scheduler=state.board.counters(),
        )
        return Response(page, media_type=_METRICS_TYPE)


def _add_control(app: FastAPI, state: HttpState) -> None:
    @app.get("/worker")
    async def worker() -> Response:
        return Response(msgspec.json.encode(state.record()), media_type=JSON_TYPE)

    @app.get("/tokenizer")
    async def tokenizer(http: Request) -> Response:
        etag = f'"{state.config.model_revision}"'
        known = [tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")]
        if etag in known or "*" in known or state.config.model_revision in known:
            return Response(status_code=304, headers={"etag": etag})
        return Response(state.ready_text().zip, media_type="application/zip", headers={"etag": etag})

    @app.post("/abort_request")
    async def abort_request(http: Request) -> Response:
        body = parse_json(await _body(http, state))
        try:
            rid = msgspec.convert(body, AbortRequest).rid
        except msgspec.ValidationError as e:
            raise ApiError(400, f"rid is not a text: {e}", param="rid") from e
        if not rid:
            raise ApiError(400, "rid is missing; the exact id of one request is needed", param="rid")
        return Response(msgspec.json.encode(AbortAnswer(state.manager.abort(rid))), media_type=JSON_TYPE)


async def _body(http: Request, state: HttpState) -> bytes:
    limit, timeout = state.flags.max_body_bytes, state.flags.body_timeout
    return await read_body(http.receive, http.headers.get("content-length"), limit=limit, timeout_s=timeout)


def _routed(http: Request) -> RoutedHeaders:
    try:
        return parse_routed_headers(http.headers.items())
    except WireError as e:
        raise ApiError(400, str(e), code="bad_wire") from e


def _media_type(http: Request) -> str:
    return http.headers.get("content-type", "").split(";")[0].strip().lower()


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON_TYPE)


def _probe(error: ApiError | None) -> Response:
    if error is not None:
        raise error
    return _json({"status": "ok"})
