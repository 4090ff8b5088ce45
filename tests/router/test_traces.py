"""A trace of each routed request reaches a collector, below the caller's and above the workers'."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from fleet_router.edge.traces import Moments
from fleet_router.settings import BadFlag, parse
from fleet_testing.collector import Collector
from fleet_testing.fake_worker import Script, error_body, sse
from fleet_testing.router_fleet import MakeFleet, MakeWorker
from fleet_testing.router_process import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
USAGE = {"usage": {"completion_tokens": 7}}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


async def test_a_request_is_one_span_below_the_caller_s_with_a_span_per_stage(
    make_worker: MakeWorker, make_fleet: MakeFleet, collector: Collector
) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode, otlp_endpoint=collector.url)
    decode.scripts.extend(
        [Script(pieces=[sse({"t": 1}, done=False), sse(USAGE)]), Script(status=400, body=error_body("bad", "no", "invalid_request_error"))]
    )
    parent = f"00-{TRACE}-b7ad6b7169203331-01"
    await fleet.post("/v1/chat/completions", CHAT, traceparent=parent, tracestate="a=b", **{"x-request-id": "mine"})
    assert (await fleet.post("/v1/chat/completions", CHAT)).status_code == 400
    assert fleet.edge.traces is not None
    await asyncio.to_thread(fleet.edge.traces.close)  # sends what is finished
    await until(lambda: sum(s.name.startswith("POST") for s in collector.spans) == 2, "both are there")
    mine = {s.name: s for s in collector.spans if s.trace_id.hex() == TRACE}
    root = mine.pop("POST /v1/chat/completions")
    assert root.parent_span_id.hex() == "b7ad6b7169203331" and set(mine) == {"read", "choose", "first_token", "stream"}
    assert all(s.parent_span_id == root.span_id for s in mine.values())
    for worker in (prefill, decode):
        leg = worker.legs[0]
        assert leg.header("traceparent") == f"00-{TRACE}-{root.span_id.hex()}-01" and leg.header("tracestate") == "a=b"
    told = {a.key: a.value.string_value or a.value.int_value for a in root.attributes}
    assert told["radixfleet.request_id"] == "mine" and told["gen_ai.usage.output_tokens"] == 7 and told["http.response.status_code"] == 200
    assert told["radixfleet.worker"] == f"127.0.0.1:{decode.record.ports.internal}" and told["radixfleet.prefill_worker"]
    other = next(s for s in collector.spans if s.name.startswith("POST") and s.trace_id.hex() != TRACE)
    assert {a.key: a.value.int_value for a in other.attributes}["http.response.status_code"] == 400


def test_stages_follow_one_another_and_those_that_did_not_happen_have_no_span() -> None:
    whole = Moments(1.0, 2.0, 3.0, 4.0, 5.0).parts()
    assert [name for name, _, _ in whole] == ["read", "choose", "first_token", "stream"] and all(a[2] == b[1] for a, b in pairwise(whole))
    assert Moments(1.0, ended=2.0).parts() == [("read", 1.0, 2.0)]


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(BadFlag, match="--otlp-endpoint"):
        parse(["--static", "http://127.0.0.1:1", "--otlp-endpoint", "collector:4318"])
