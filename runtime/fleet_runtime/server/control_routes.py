"""What the internal port has beside the public API: the worker's record and tokenizer, aborts, load, and control calls to the scheduler."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from fleet_contract.errors import ApiError
from fleet_contract.names import PAGE_SIZE
from fleet_contract.worker import AbortAnswer, AbortRequest
from fleet_runtime.server import validate
from fleet_runtime.server.control import CONTROL_CALLS, LogLevel
from fleet_runtime.server.intake import Intake, json_response
from fleet_runtime.server.responses import JSON_TYPE
from fleet_runtime.server.state import HttpState


def add_control_routes(app: FastAPI, intake: Intake) -> None:
    """Registers the endpoints."""
    _add_record(app, intake.state)
    state = intake.state

    @app.post("/abort_request")
    async def abort_request(http: Request) -> Response:
        body = await intake.object(http)
        try:
            rid = msgspec.convert(body, AbortRequest).rid
        except msgspec.ValidationError as e:
            raise ApiError(400, f"rid is not a text: {e}", param="rid") from e
        if not rid:
            raise ApiError(400, "rid is missing; the exact id of one request is needed", param="rid")
        return json_response(AbortAnswer(state.manager.abort(rid)))

    @app.get("/get_load")
    async def get_load() -> Response:
        return json_response(load(state))

    @app.get("/internals")
    async def internals() -> Response:
        scheduler = msgspec.Raw(await state.controls.call("internals", {}))
        http = {"open_requests": len(state.manager), "control_calls": len(state.controls), "late_messages": state.manager.late}
        return json_response({"http": http, "scheduler": scheduler, "counters": state.board.counters()})

    for path in CONTROL_CALLS:
        _add_call(app, intake, path)


def _add_call(app: FastAPI, intake: Intake, path: str) -> None:
    op, kind = CONTROL_CALLS[path]

    async def call(http: Request) -> Response:
        options = validate.checked(kind, await intake.object(http, may_be_empty=True))
        data = await intake.state.controls.call(op, options.model_dump())
        if isinstance(options, LogLevel):
            logging.getLogger().setLevel(options.level.upper())
        return Response(data, media_type=JSON_TYPE)

    app.add_api_route(path, call, methods=["POST"], name=op)


def _add_record(app: FastAPI, state: HttpState) -> None:
    @app.get("/worker")
    async def worker() -> Response:
        return json_response(state.record())

    @app.get("/tokenizer")
    async def tokenizer(http: Request) -> Response:
        etag = f'"{state.config.model_revision}"'
        known = [tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")]
        if etag in known or "*" in known or state.config.model_revision in known:
            return Response(status_code=304, headers={"etag": etag})
        return Response(state.ready_text().zip, media_type="application/zip", headers={"etag": etag})


def load(state: HttpState) -> dict[str, Any]:
    """What the worker carries now, from the heartbeat board. Raises ApiError 503 until the scheduler is known."""
    record, counters = state.record(), state.board.counters()
    return {
        "incarnation": record.incarnation,
        "rank": record.rank,
        "open_requests": len(state.manager),
        "running_requests": counters["running_requests"],
        "waiting_requests": counters["waiting_requests"],
        "max_rows": record.max_rows,
        "kv_used_tokens": (counters["pages_tree"] + counters["pages_request"]) * PAGE_SIZE,
        "kv_cached_tokens": counters["pages_tree"] * PAGE_SIZE,
        "kv_capacity_tokens": record.kv_capacity_tokens,
        "draining": state.manager.draining,
    }
