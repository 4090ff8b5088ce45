"""What an edge is asked, by the brain or by the control process: all that takes reading a request or talking to workers. Loads nothing of the
brain."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

import msgspec

from fleet_contract.errors import ApiError
from fleet_contract.worker import ProbeRequest
from fleet_router.edge.service import DataService
from fleet_router.engines.base import key_headers
from fleet_router.engines.kinds import engine_of
from fleet_router.errors import UNDECODABLE
from fleet_router.http.client import fetch
from fleet_router.messages import Ask
from fleet_router.table import WorkerView

FLUSH_TIMEOUT_S: Final = 15.0
T = TypeVar("T")


class ModelNamed(msgspec.Struct, frozen=True):
    """Body of `POST /flush_cache`."""

    model: str = ""


class RequestNamed(msgspec.Struct, frozen=True):
    """Body of `POST /abort_request`: the id that the client knows, from X-Request-Id."""

    request_id: str


class EdgeAnswers:
    """All answers are JSON."""

    def __init__(self, service: DataService) -> None:
        self._service = service

    def readiness(self) -> dict[str, Any]:
        """Body of /readyz."""
        return self._service.readiness()

    async def answer(self, ask: Ask) -> bytes:
        """Raises ApiError for what cannot be told, ValueError for what is no question."""
        match ask.what:
            case "ready":
                return msgspec.json.encode(self.readiness())
            case "probe":
                revision = msgspec.json.decode(ask.body, type=ProbeRequest).revision
                return msgspec.json.encode(await self._service.probe(ask.args[0], ask.args[1], revision))
            case "route":
                return msgspec.json.encode(await self._service.explain(ask.body, *ask.args))
            case "flush":
                return msgspec.json.encode({"workers": await self.flush(_read(ask.body or b"{}", ModelNamed).model)})
            case "abort":
                return msgspec.json.encode({"aborted": self._service.dispatcher.running.abort(_read(ask.body, RequestNamed).request_id)})
        raise ValueError(f"unknown question {ask.what!r}")

    async def flush(self, model: str) -> dict[str, Any]:
        """Every ready worker of a service (without a name: of the only one) forgets its cached prefixes; what each says. Raises ApiError 404."""
        service = self._service.dispatcher.find(model)
        ready = [w for w in service.workers if w.routable]
        said = await asyncio.gather(*map(self._flush, ready))
        return {w.name: answer for w, answer in zip(ready, said, strict=True)}

    async def _flush(self, worker: WorkerView) -> dict[str, Any]:
        engine, pool = engine_of(worker.record.engine), self._service.dispatcher.pool
        headers = key_headers(worker.record.key_env)
        try:
            status, body = await fetch(
                pool, worker.host, worker.port, "POST", engine.flush_path, body=b"{}", headers=headers, timeout_s=FLUSH_TIMEOUT_S
            )
        except ApiError as e:
            return {"ok": False, "error": e.message}
        return {"ok": True} if status == 200 else {"ok": False, "error": f"POST {engine.flush_path}: {engine.error(status, body).message}"}


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as e:
        raise ApiError(400, f"the body is not as it should be: {e}", code="invalid_json") from None
