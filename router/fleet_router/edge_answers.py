"""What an edge is asked, by the brain or by the control process: all that takes reading a request. Loads nothing of the brain."""

from __future__ import annotations

from typing import Any

import msgspec

from fleet_contract.worker import ProbeRequest
from fleet_router.messages import Ask
from fleet_router.service import DataService


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
                return msgspec.json.encode(await self._service.explain(ask.body))
        raise ValueError(f"unknown question {ask.what!r}")
