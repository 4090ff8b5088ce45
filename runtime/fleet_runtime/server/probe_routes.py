"""Probes and metrics. On both ports; they answer from memory, whatever the scheduler does."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from fastapi.responses import Response

from fleet_contract.errors import ApiError
from fleet_runtime.server.health import look, not_live, not_ready
from fleet_runtime.server.intake import json_response
from fleet_runtime.server.state import HttpState

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def add_probe_routes(app: FastAPI, state: HttpState) -> None:
    """Registers the endpoints."""

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
            late_messages=state.manager.late + state.mailbox.dropped + state.late_replies,
            texts_encoded=state.text.encoder.texts_encoded if state.text is not None else 0,
            ended=state.guard.ended,
            scheduler=state.board.counters(),
        )
        return Response(page, media_type=_METRICS_TYPE)


def _probe(error: ApiError | None) -> Response:
    if error is not None:
        raise error
    return json_response({"status": "ok"})
