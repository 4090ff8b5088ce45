"""One trace of each request, sent to the collector of `--otlp-endpoint` (OTLP over HTTP): a server span, and below it one span per stage.

Made by `process`, called once at a request's end. Nothing is kept open meanwhile: the stages are moments that were noted, so a request costs
nothing but its record, and without the flag not even that. The caller's W3C `traceparent` becomes the parent. The library is loaded only here
and only when asked for. Attribute names: OpenTelemetry semantic conventions for HTTP and generative AI.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from fleet_contract.otlp import check_otlp_endpoint, open_provider
from fleet_runtime.errors import StartError


@dataclass(slots=True)
class Stages:
    """The moments of one request, CLOCK_MONOTONIC seconds; 0.0: did not come to that. `queued_s`, `prefill_s`: as the scheduler measured them."""

    endpoint: str
    started: float
    admitted: float = 0.0  # body read, checked, tokenized, handed to the scheduler
    first_token: float = 0.0
    ended: float = 0.0
    queued_s: float = 0.0  # from the scheduler's receipt to its first step
    prefill_s: float = 0.0  # from its first step to its first token
    status: int = 200
    request_id: str = ""
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def parts(self) -> list[tuple[str, float, float]]:
        """(stage, begin, end) of those that happened, in order."""
        if not self.admitted:
            return [("read", self.started, self.ended)]
        out = [("read", self.started, self.admitted)]
        if not self.first_token:
            return [*out, ("queue", self.admitted, self.ended)]
        prefill_at = max(self.admitted, self.first_token - self.prefill_s)
        queue_at = max(self.admitted, prefill_at - self.queued_s)
        return [*out, ("queue", queue_at, prefill_at), ("prefill", prefill_at, self.first_token), ("decode", self.first_token, self.ended)]

    def facts(self) -> dict[str, object]:
        """For the log."""
        seconds: dict[str, object] = {f"{name}_s": round(max(0.0, end - begin), 6) for name, begin, end in self.parts()}
        return {
            "endpoint": self.endpoint, "request_id": self.request_id, "status": self.status, "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens, "completion_tokens": self.completion_tokens, **seconds,
        }  # fmt: skip


def carrier_of(scope: Scope) -> dict[str, str]:
    """The W3C trace context of an ASGI request's headers."""
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in (b"traceparent", b"tracestate")}


def check_endpoint(endpoint: str) -> None:
    """`--otlp-endpoint`. Raises StartError(BadFlag)."""
    try:
        check_otlp_endpoint(endpoint)
    except ValueError as e:
        raise StartError("BadFlag", str(e)) from e


class Traces:
    """Exports spans in batches from a thread of its own."""

    def __init__(self, endpoint: str, *, service: str, worker: str) -> None:
        """Args: endpoint: scheme://host:port of a collector. service, worker: names in the resource. Raises StartError(BadFlag)."""
        check_endpoint(endpoint)
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = {"service.name": "radixfleet-runtime", "service.namespace": service, "service.instance.id": worker}
        self._provider = open_provider(endpoint, resource)
        self._tracer = self._provider.get_tracer("fleet_runtime")
        self._propagator: Any = TraceContextTextMapPropagator()
        self._in_context: Any = set_span_in_context
        self._server_kind: Any = SpanKind.SERVER
        self._error: Any = Status(StatusCode.ERROR)

    def record(self, stages: Stages, carrier: dict[str, str]) -> None:
        """The spans of one finished request. carrier: its `traceparent` and `tracestate` headers, if it had them."""
        offset_ns = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + offset_ns

        attributes: dict[str, str | int] = {
            "http.route": stages.endpoint,
            "http.response.status_code": stages.status,
            "radixfleet.request_id": stages.request_id,
            "gen_ai.request.model": stages.model,
            "gen_ai.usage.input_tokens": stages.prompt_tokens,
            "gen_ai.usage.output_tokens": stages.completion_tokens,
            "radixfleet.cached_tokens": stages.cached_tokens,
        }
        parent = self._propagator.extract(carrier)
        root = self._tracer.start_span(
            f"POST {stages.endpoint}", context=parent, kind=self._server_kind, attributes=attributes, start_time=at(stages.started)
        )
        if stages.status >= 500:
            root.set_status(self._error)
        below = self._in_context(root)
        for name, begin, end in stages.parts():
            self._tracer.start_span(name, context=below, start_time=at(begin)).end(at(max(begin, end)))
        root.end(at(stages.ended))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
