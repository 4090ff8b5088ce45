"""From an HTTP request to one that has a rid: its routed headers, its body, its refusal. Every generating endpoint of every dialect opens here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from fastapi import Request
from fastapi.responses import Response

from fleet_contract import names
from fleet_contract.errors import CODE_ABORTED, SERVER, ApiError
from fleet_contract.wire import RoutedHeaders, WireError, parse_routed_headers, split_ids_body
from fleet_runtime.server import validate
from fleet_runtime.server.body import ClientGone, parse_object, read_body
from fleet_runtime.server.manager import ReqState
from fleet_runtime.server.requests import check_leg, stale
from fleet_runtime.server.responses import JSON_TYPE
from fleet_runtime.server.state import HttpState

# The request's state, its body, and the prompt's ids if the router sent them -> the response that owns the request from then on.
Build = Callable[[ReqState, dict[str, Any], list[int] | None], Awaitable[Response]]
ERROR_BODY: Final = "error_body"  # key in an ASGI scope's state: how a dialect writes an error, (ApiError, request id) -> bytes


class Intake:
    """One per port."""

    def __init__(self, state: HttpState, *, internal: bool) -> None:
        self.state = state
        self.internal = internal

    async def open(self, http: Request, build: Build) -> Response:
        """Opens a request, reads it, checks it; from then on the response owns it."""
        state = self.state
        routed = _routed(http) if self.internal else RoutedHeaders()
        request = state.manager.open(routed)
        try:
            check_leg(state, request)
            body, ids = await self._read(http)
            if not self.internal:
                validate.refuse_internal_options(body)
            response = await build(request, body, ids)
            if request.aborted:
                raise ApiError(499, request.aborted, code=CODE_ABORTED)
        except BaseException as e:
            state.metrics.disconnects += isinstance(e, ClientGone)
            state.manager.reject(request, _reason(e))
            state.manager.release(request)
            raise
        return response

    async def object(self, http: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
        """The JSON object of a body. Raises ApiError."""
        data = await self._body(http)
        return {} if may_be_empty and not data.strip() else await parse_object(data)

    async def _body(self, http: Request) -> bytes:
        limit, timeout = self.state.flags.max_body_bytes, self.state.flags.body_timeout
        return await read_body(http.receive, http.headers.get("content-length"), limit=limit, timeout_s=timeout)

    async def _read(self, http: Request) -> tuple[dict[str, Any], list[int] | None]:
        data = await self._body(http)
        if _media_type(http) != names.CONTENT_TYPE_IDS:
            return await parse_object(data), None
        length = http.headers.get(names.HEADER_JSON_LENGTH, "")
        if not (length.isascii() and length.isdigit()):
            raise ApiError(400, f"header {names.HEADER_JSON_LENGTH} is {length[:40]!r}; the JSON's length in bytes is needed", code="bad_wire")
        revision = http.headers.get(names.HEADER_MODEL_REVISION, "")
        if revision != self.state.config.model_revision:
            raise stale(f"the token ids are of model revision {revision[:40]!r}, this worker has {self.state.config.model_revision}")
        try:
            json_bytes, ids = split_ids_body(int(length), data)
        except WireError as e:
            raise ApiError(400, str(e), code="bad_wire") from e
        return await parse_object(json_bytes), ids


def json_response(value: Any) -> Response:
    """200 with a JSON body."""
    return Response(msgspec.json.encode(value), media_type=JSON_TYPE)


def _reason(error: BaseException) -> ApiError:
    """What a leg's peer is told of a request that ended before its admission."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientGone):
        return ApiError(499, "the client closed the connection", code=CODE_ABORTED)
    return ApiError(500, f"the worker failed on this request ({type(error).__name__})", type=SERVER, code="internal")


def _routed(http: Request) -> RoutedHeaders:
    try:
        return parse_routed_headers(http.headers.items())
    except WireError as e:
        raise ApiError(400, str(e), code="bad_wire") from e


def _media_type(http: Request) -> str:
    return http.headers.get("content-type", "").split(";")[0].strip().lower()
