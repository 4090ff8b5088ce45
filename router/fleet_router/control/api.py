"""The control port's endpoints (FastAPI): health, metrics, tables, probes and explanations. All answers come from the edge over the link."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from fleet_contract import errors as contract_errors
from fleet_contract.errors import ApiError
from fleet_contract.worker import ProbeAnswer, ProbeRequest
from fleet_router import metrics
from fleet_router.control.workers_api import add_workers_api
from fleet_router.errors import UNDECODABLE
from fleet_router.link import LinkClient
from fleet_router.messages import Reply

JSON: Final = "application/json"
MAX_PROBE_BYTES: Final = 64 << 10
PROBE_TIMEOUT_S: Final = 28.0
PAGE_HEADERS: Final = {  # the page runs its own script and talks to its own origin, nothing else
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
_CODES: Final = {404: (contract_errors.NOT_FOUND, "not_found"), 405: (contract_errors.INVALID_REQUEST, "method_not_allowed")}


def create_app(link: LinkClient, max_body_bytes: int) -> FastAPI:
    """The application; `link` is connected elsewhere."""
    app = FastAPI(title="radixfleet-router control", docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    _add_health(app, link)
    _add_tables(app, link, max_body_bytes)
    _add_dashboard(app)
    add_workers_api(app, link)
    return app


def _answer_error(e: ApiError) -> Response:
    headers = {"Retry-After": str(e.retry_after_s)} if e.retry_after_s is not None else None
    return Response(e.body(""), e.status, headers, JSON)


def _answer(reply: Reply) -> Response:
    return Response(reply.body, reply.status, media_type=JSON)


def _not_ok(why: str) -> Response:
    """A probe is always answered with 200."""
    return Response(msgspec.json.encode(ProbeAnswer(ok=False, error=why)), media_type=JSON)


def _add_errors(app: FastAPI) -> None:
    """Everything that goes wrong has the one shape."""

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, e: ApiError) -> Response:
        return _answer_error(e)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, e: HTTPException) -> Response:
        type_, code = _CODES.get(e.status_code, (contract_errors.INVALID_REQUEST, "invalid_request"))
        return _answer_error(ApiError(e.status_code, f"{request.method} {request.url.path[:200]}: {e.detail}", type=type_, code=code))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, e: RequestValidationError) -> Response:
        return _answer_error(ApiError(400, f"the request is not valid: {e.errors()[0]['msg']}"))

    @app.exception_handler(Exception)
    async def on_bug(_: Request, e: Exception) -> Response:
        return _answer_error(ApiError(500, "the router failed on this request; see its log", type=contract_errors.SERVER, code="internal"))


def _add_health(app: FastAPI, link: LinkClient) -> None:
    """Liveness of this process, readiness of the edge, metrics."""

    @app.get("/livez")
    async def livez() -> Response:
        return Response(b'{"status":"ok"}', media_type=JSON)

    @app.get("/readyz")
    async def readyz() -> Response:
        reply = await link.ask_ready()
        state = msgspec.json.decode(reply.body, type=dict[str, Any])
        return Response(reply.body, 200 if state.get("status") in ("ready", "degraded") else 503, media_type=JSON)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        try:
            reply = await link.ask("metrics")
            text = metrics.render(msgspec.msgpack.decode(reply.body, type=metrics.Snapshot))
        except ApiError:
            text = metrics.render(None)
        return Response(text, media_type="text/plain; version=0.0.4")


def _add_tables(app: FastAPI, link: LinkClient, max_body_bytes: int) -> None:
    """What the router knows and decides."""

    @app.get("/workers")
    async def workers() -> Response:
        return _answer(await link.ask("workers"))

    @app.get("/fleet/{namespace}/{name}")
    async def fleet(namespace: str, name: str) -> Response:
        return _answer(await link.ask("fleet", namespace, name))

    @app.post("/fleet/{namespace}/{name}/probe")
    async def probe(namespace: str, name: str, request: Request) -> Response:
        try:
            body = await read_body(request, MAX_PROBE_BYTES)
            msgspec.json.decode(body, type=ProbeRequest)
            reply = await link.ask("probe", namespace, name, body=body, timeout_s=PROBE_TIMEOUT_S)
        except UNDECODABLE as e:
            return _not_ok(f'the body has to be {{"revision": "..."}}: {e}')
        except ApiError as e:
            return _not_ok(e.message)
        return _answer(reply) if reply.status == 200 else _not_ok(ApiError.from_body(reply.status, reply.body).message)

    @app.post("/debug/route")
    async def route(request: Request, path: str = "") -> Response:
        return _answer(await link.ask("route", path, body=await read_body(request, max_body_bytes), timeout_s=10.0))

    @app.post("/flush_cache")
    async def flush(request: Request) -> Response:
        return _answer(await link.ask("flush", body=await read_body(request, MAX_PROBE_BYTES), timeout_s=20.0))

    @app.post("/abort_request")
    async def abort(request: Request) -> Response:
        return _answer(await link.ask("abort", body=await read_body(request, MAX_PROBE_BYTES), timeout_s=10.0))

    @app.get("/debug/queue")
    async def queue() -> Response:
        return _answer(await link.ask("queue"))

    @app.get("/debug/overview")
    async def get_overview() -> Response:
        return _answer(await link.ask("overview"))

    @app.get("/debug/route")
    async def decisions() -> Response:
        return _answer(await link.ask("decisions"))


def _add_dashboard(app: FastAPI) -> None:
    """One page for people; it asks /debug/overview each second."""
    page = files("fleet_router.control").joinpath("dashboard.html").read_bytes()

    @app.get("/")
    @app.get("/dashboard")
    async def dashboard() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises ApiError 413."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
    return bytes(body)
