"""Workers of static mode that come and go while the router runs: what `POST /workers` and its like do, beside the registry.

They are kept in memory only, by this router alone: the answers say so.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from fleet_contract import errors as contract_errors
from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_router.brain.brain import Brain
from fleet_router.brain.registry import Endpoint, Registry
from fleet_router.errors import UNDECODABLE
from fleet_router.target import BadTarget, Target, parse_target

KEPT: Final = "in memory of this router, until it restarts; name it with --static to keep it"
_object: Final = msgspec.json.Decoder(dict[str, Any])


class StaticWorkers:
    """Answers to the questions `worker_add`, `worker_remove`, `worker_drain` and `worker_resume` of the control process."""

    def __init__(self, brain: Brain, registry: Registry) -> None:
        self._brain = brain
        self._registry = registry

    def answer(self, what: str, args: list[str], body: bytes) -> bytes:
        """JSON. Raises ApiError for what cannot be done."""
        if self._brain.settings.kubernetes:
            text = "with --kubernetes the workers are the pods of InferenceServices; change those, or run a router with --static"
            raise ApiError(409, text, code="workers_from_kubernetes")
        if what == "worker_add":
            return msgspec.json.encode(self._add(body))
        endpoint = self._registry.endpoints.get(args[0])
        if endpoint is None:
            there = ", ".join(sorted(self._registry.endpoints)) or "none"
            raise ApiError(404, f"there is no worker {args[0][:200]!r}; there is: {there}", type=contract_errors.NOT_FOUND, code="worker_not_found")
        match what:
            case "worker_remove":
                told = self._told(endpoint) | {"state": "removed"}
                self._registry.remove(endpoint.key)
            case "worker_drain":
                self._registry.drain(endpoint.key, is_drained=True)
                told = self._told(endpoint)
            case "worker_resume":
                self._registry.drain(endpoint.key, is_drained=False)
                told = self._told(endpoint)
            case _:
                raise ValueError(f"unknown question {what!r}")
        return msgspec.json.encode(told)

    def _add(self, body: bytes) -> dict[str, Any]:
        target = read_target(body)
        endpoint = self._registry.add(target)
        if endpoint is None:
            raise ApiError(409, f"worker {target.key} is there already; DELETE /workers/{target.key} first", code="worker_exists")
        return self._told(endpoint) | {"kept": KEPT}

    def _told(self, endpoint: Endpoint) -> dict[str, Any]:
        target = endpoint.target
        live = [w for w in self._brain.workers if f"{w.host}:{w.port}" == f"{target.host}:{target.port}"]
        state = next((w.state for w in live if not w.removed), "draining" if endpoint.is_drained else "starting")
        inflight = sum(w.inflight for w in live)
        return {"id": endpoint.key, "engine": target.engine, "role": target.role, "state": state, "inflight": inflight}


def read_target(body: bytes) -> Target:
    """The worker that a body names: `url` as for --static, or http://HOST:PORT with `engine`, `role` and so on as fields of their own.
    Raises ApiError."""
    try:
        fields = _object.decode(body)
    except UNDECODABLE as e:
        raise ApiError(400, f'the body has to be like {{"url": "http://HOST:PORT", "engine": "vllm"}}: {e}', code="invalid_json") from None
    url, engine = fields.pop("url", None), fields.pop("engine", "")
    wrong = next((name for name, v in fields.items() if type(v) not in (str, int)), None)
    if not isinstance(url, str) or not isinstance(engine, str) or wrong is not None:
        raise ApiError(400, f"{wrong or 'url'} has to be a string", code="invalid_type", param=wrong or "url")
    if engine and engine != names.ENGINE_OURS:
        url = url if url.startswith(f"{engine}+") else f"{engine}+{url}"
    if fields:
        url += ("&" if "?" in url else "?") + urlencode(fields)
    try:
        return parse_target(url)
    except BadTarget as e:
        raise ApiError(400, str(e), code="invalid_value", param="url") from None
