"""The two applications of a runtime: the public API, and the internal one (the same paths, routed requests, and control calls).

`Border` is outermost: it gives every answer its request id, counts it, keeps internal names off the public port, and turns whatever was
raised into the one error shape.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleet_contract import names
from fleet_contract.errors import NOT_FOUND, SERVER, ApiError
from fleet_contract.logs import facts
from fleet_runtime.server.access import OPEN_PATHS, parse_origins, with_cors
from fleet_runtime.server.anthropic_routes import add_anthropic_routes
from fleet_runtime.server.body import ClientGone
from fleet_runtime.server.control_routes import add_control_routes
from fleet_runtime.server.dialects import error_dialect, id_headers
from fleet_runtime.server.intake import ERROR_BODY, Intake
from fleet_runtime.server.metrics import endpoint_of
from fleet_runtime.server.ollama_routes import add_ollama_routes
from fleet_runtime.server.openai_routes import add_openai_routes
from fleet_runtime.server.openapi import openapi
from fleet_runtime.server.probe_routes import add_probe_routes
from fleet_runtime.server.request_id import accept_request_id
from fleet_runtime.server.responses import JSON_TYPE
from fleet_runtime.server.state import HttpState

log = logging.getLogger(__name__)

_PREFIX: Final = names.HEADER_PREFIX.lower().encode()


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
        if not self._internal and (dialect := error_dialect(scope["path"])) is not None:
            request_facts[ERROR_BODY] = dialect  # a router reads one shape, and writes the dialect's
        told_id = [(name, request_id.encode()) for name in id_headers(scope["path"])]
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *told_id]}
            await send(message)

        try:
            if not self._internal:
                if self._state.keys is not None and scope["path"] not in OPEN_PATHS:
                    self._state.keys.check(headers)
                _refuse_internal_headers(headers)
            await self._app(scope, receive, answer)
        except ApiError as e:
            await _error_response(e, request_facts)(scope, receive, answer)
        except Exception:  # the request's border: it is answered already (`_on_fault`); the process and other requests go on
            log.exception("a request failed by a fault of ours", extra=facts(request_id=request_id))
        endpoint = endpoint_of(scope)
        self._state.metrics.requests[endpoint, request_facts.get("counted_status", status)] += 1


def _error_response(error: ApiError, facts_of_request: Mapping[str, Any]) -> Response:
    """In the shape of the path's dialect."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413) or error.code in ("draining", "drain_deadline"):
        headers["connection"] = "close"
    write = facts_of_request.get(ERROR_BODY, ApiError.body)
    return Response(write(error, facts_of_request["request_id"]), error.status, headers, JSON_TYPE)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error, request.scope["state"])


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads it; it is counted."""
    return Response(status_code=499)


async def _on_fault(request: Request, error: Exception) -> Response:
    message = f"the server failed on this request ({type(error).__name__}); its log has the cause"
    return _error_response(ApiError(500, message, type=SERVER, code="internal"), request.scope["state"])


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
    intake = Intake(state, internal=internal)
    add_openai_routes(app, intake)
    add_anthropic_routes(app, intake)
    add_ollama_routes(app, intake)
    add_probe_routes(app, state)
    document = msgspec.json.encode(openapi(state.config.served_names, internal=internal))

    @app.get("/openapi.json")
    async def openapi_json() -> Response:
        return Response(document, media_type=JSON_TYPE)

    if internal:
        add_control_routes(app, intake)
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
    write = request.scope["state"].get(ERROR_BODY, ApiError.body)
    return Response(write(refusal, request.state.request_id), refusal.status, headers, JSON_TYPE)
