"""Sending spans to an OpenTelemetry collector (OTLP over HTTP), the same for router and runtime. The library is loaded only when asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_MAX_QUEUE: Final = 4096  # finished spans that wait for the collector; more are dropped, requests never wait


def check_otlp_endpoint(endpoint: str) -> None:
    """`--otlp-endpoint`. Raises ValueError."""
    if not re.fullmatch(r"https?://[^/\s]+/?", endpoint):
        raise ValueError(f"--otlp-endpoint is {endpoint!r}; scheme://host:port of an OTLP/HTTP collector is needed, like http://127.0.0.1:4318")


def open_provider(endpoint: str, resource: Mapping[str, str]) -> Any:
    """A tracer provider of the library that exports in batches from a thread of its own. Args: endpoint: checked."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create(dict(resource)))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUE, schedule_delay_millis=1000))
    return provider
