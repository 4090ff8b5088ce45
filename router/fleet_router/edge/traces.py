"""A server span of each request that workers answer, below the caller's, with a span per stage; sent to the collector of `--otlp-endpoint`.

Made by `edge`, used by `service`. The workers' own spans stand below it: its context goes to them as `traceparent`. Attribute names:
OpenTelemetry semantic conventions for HTTP and generative AI.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet_contract.otlp import open_provider
from fleet_router.desk import Lease


@dataclass(slots=True)
class Moments:
    """Of one request, loop time in seconds; 0.0: did not come to that. The last attempt's count."""

    began: float
    asked: float = 0.0  # body read, prompt tokenized
    leased: float = 0.0  # workers chosen
    first_byte: float = 0.0
    ended: float = 0.0

    def parts(self) -> list[tuple[str, float, float]]:
        """(stage, begin, end) of those that happened, in order."""
        named = (("read", self.began), ("choose", self.asked), ("first_token", self.leased), ("stream", self.first_byte))
        there = [(name, at) for name, at in named if at]
        ends = [*(at for _, at in there[1:]), self.ended]
        return [(name, at, max(at, end)) for (name, at), end in zip(there, ends, strict=True)]


class Span:
    """One request's."""

    def __init__(self, traces: Traces, span: Any, moments: Moments) -> None:
        self.moments = moments
        self._traces = traces
        self._span = span

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """Its context, for workers."""
        carrier: dict[str, str] = {}
        self._traces.propagator.inject(carrier, context=self._traces.in_context(self._span))
        return tuple(carrier.items())

    def chosen(self, lease: Lease) -> None:
        """Workers were chosen."""
        self._span.set_attributes(
            {
                "radixfleet.worker": lease.serving.worker.name,
                "radixfleet.prefill_worker": lease.prefill.worker.name if lease.prefill is not None else "",
                "radixfleet.hit_tokens": lease.predicted_tokens,
                "radixfleet.queue_ms": int(lease.waited_s * 1000),
                "gen_ai.usage.input_tokens": lease.prompt_tokens,
            }
        )

    def end(self, status: int, made: int | None) -> None:
        """The request is over. Args: status: 0: the client left. made: tokens of the answer, if that is known."""
        self._span.set_attribute("http.response.status_code", status or 499)
        if made is not None:
            self._span.set_attribute("gen_ai.usage.output_tokens", made)
        self._traces.close_span(self._span, self.moments, failed=status >= 500)


class Traces:
    """Exports spans in batches from a thread of its own."""

    def __init__(self, endpoint: str, router_id: str) -> None:
        """Args: endpoint: checked."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = open_provider(endpoint, {"service.name": "radixfleet-router", "service.instance.id": router_id})
        self._tracer = self._provider.get_tracer("fleet_router")
        self.propagator: Any = TraceContextTextMapPropagator()
        self.in_context: Any = set_span_in_context
        self._server_kind: Any = SpanKind.SERVER
        self._error: Any = Status(StatusCode.ERROR)

    def begin(self, path: str, request_id: str, model: str, carrier: Sequence[tuple[str, str]], began: float) -> Span:
        """Args: carrier: the caller's context. began: loop time."""
        attributes = {"http.route": path, "radixfleet.request_id": request_id, "gen_ai.request.model": model}
        parent = self.propagator.extract(dict(carrier))
        span = self._tracer.start_span(f"POST {path}", context=parent, kind=self._server_kind, attributes=attributes, start_time=_at(began))
        return Span(self, span, Moments(began))

    def close_span(self, span: Any, moments: Moments, *, failed: bool) -> None:
        """Its stages, and its end."""
        if failed:
            span.set_status(self._error)
        below = self.in_context(span)
        for name, begin, end in moments.parts():
            self._tracer.start_span(name, context=below, start_time=_at(begin)).end(_at(end))
        span.end(_at(moments.ended))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _at(loop_time: float) -> int:
    """Loop time (CLOCK_MONOTONIC seconds) as ns since 1970."""
    return int(loop_time * 1e9) + time.time_ns() - time.monotonic_ns()
