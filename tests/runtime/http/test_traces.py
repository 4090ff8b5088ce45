"""Traces reach an OpenTelemetry collector: here a small HTTP server that decodes what it gets with OpenTelemetry's own messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from fleet_runtime.errors import StartError
from fleet_runtime.server.traces import Stages, Traces, check_endpoint
from fleet_testing.collector import Collector
from fleet_testing.runtime import Runtime


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


@pytest.mark.processes
def test_a_worker_sends_a_trace_of_each_request_and_counts_its_stages(collector: Collector, tmp_path: Path) -> None:
    with Runtime(tmp_path, f"--otlp-endpoint={collector.url}", "--log-level=debug") as runtime:
        runtime.wait_ready()
        body = {"model": "simulated", "prompt": "hello", "max_tokens": 5}
        headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "x-request-id": "my-id"}
        assert httpx.post(f"{runtime.data}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
        metrics = runtime.metrics()
        assert metrics["radixfleet_runtime_queued_seconds_count"] == metrics["radixfleet_runtime_prefill_seconds_count"] >= 1
        assert runtime.stop() == 0  # what is finished is sent before the end
        mine = {s.name for s in collector.spans if s.trace_id.hex() == "a" * 32}
        assert mine == {"POST /v1/completions", "read", "queue", "prefill", "decode"}
        ended = [json.loads(line) for line in runtime.text_of_log().splitlines() if '"request ended"' in line and "my-id" in line]
        assert ended and ended[-1]["completion_tokens"] == 5 and {"read_s", "queue_s", "prefill_s", "decode_s"} <= ended[-1].keys()


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://c:4317", "http://c:4318/v1/traces"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(StartError, match="--otlp-endpoint"):
        check_endpoint(endpoint)


def test_a_collector_that_is_away_costs_no_request(collector: Collector) -> None:
    url = collector.url
    collector.server.server_close()
    traces = Traces(url, service="", worker="w")
    traces.record(Stages("/x", started=1, ended=2, status=500), {})  # returns at once, raises nothing
