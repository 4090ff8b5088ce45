"""Traces reach an OpenTelemetry collector: here a small HTTP server that decodes what it gets with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fleet_runtime.server.traces import Stages, Traces


class Collector:
    """Keeps every span that is posted to /v1/traces."""

    def __init__(self) -> None:
        self.spans: list = []  # type: ignore[type-arg]
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                return None

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_a_request_is_one_trace_below_the_callers_with_a_span_per_stage(collector: Collector) -> None:
    traces = Traces(collector.url, service="ns/chat", worker="w-0")
    stages = Stages(
        "/v1/chat/completions", started=100.0, admitted=100.1, first_token=101.0, ended=103.0, queued_s=0.4, prefill_s=0.5, request_id="r-1",
        model="m", prompt_tokens=7, cached_tokens=4, completion_tokens=9,
    )  # fmt: skip
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    traces.record(stages, {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    traces.close()
    spans = {span.name: span for span in collector.spans}
    root = spans["POST /v1/chat/completions"]
    assert {s.trace_id.hex() for s in collector.spans} == {trace_id} and root.parent_span_id.hex() == "b7ad6b7169203331"
    assert all(spans[name].parent_span_id == root.span_id for name in ("read", "queue", "prefill", "decode"))
    lengths = {name: round((s.end_time_unix_nano - s.start_time_unix_nano) / 1e9, 3) for name, s in spans.items()}
    assert lengths == {"POST /v1/chat/completions": 3.0, "read": 0.1, "queue": 0.4, "prefill": 0.5, "decode": 2.0}
    told = {a.key: a.value.string_value or a.value.int_value for a in root.attributes}
    assert told["radixfleet.request_id"] == "r-1" and told["gen_ai.usage.input_tokens"] == 7 and told["http.response.status_code"] == 200
    assert collector.resources[0]["service.name"] == "radixfleet-runtime" and collector.resources[0]["service.instance.id"] == "w-0"


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        (Stages("/x", started=1, ended=2, status=400), ["read"]),
        (Stages("/x", started=1, admitted=1.5, ended=2, status=503), ["read", "queue"]),
        (Stages("/x", started=1, admitted=1.5, first_token=1.6, ended=2, queued_s=9, prefill_s=9), ["read", "queue", "prefill", "decode"]),
    ],
    ids=["refused", "never ran", "clocks that disagree"],
)
def test_stages_that_did_not_happen_have_no_span_and_none_begins_before_the_one_above(stages: Stages, names: list[str]) -> None:
    parts = stages.parts()
    assert [name for name, _, _ in parts] == names
    assert all(begin <= end for _, begin, end in parts) and all(a[2] <= b[1] for a, b in pairwise(parts))


def test_a_collector_that_is_away_costs_no_request(collector: Collector) -> None:
    url = collector.url
    collector.server.server_close()
    traces = Traces(url, service="", worker="w")
    traces.record(Stages("/x", started=1, ended=2, status=500), {})  # returns at once, raises nothing
