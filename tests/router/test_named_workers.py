"""Workers that a user names: the URLs of --static, and REST while the router runs (R40)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from fleet_cli.top import picture
from fleet_contract.errors import ApiError
from fleet_router.brain import overview
from fleet_router.brain.static_workers import read_target
from fleet_router.settings import BadFlag, Settings
from fleet_router.target import Target, parse_target
from fleet_testing.engines.server import Timing
from fleet_testing.engines.vllm import FakeVllm
from fleet_testing.fake_worker import FakeWorker
from fleet_testing.router_fleet import MakeWorker
from fleet_testing.router_process import RouterProcess, held_port, until, until_async

SHOWN: Any = {(name, ()): 0 for name in ("inflight", "waiting", "connections")}
Start = Callable[..., Awaitable[Any]]


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:40001", Target("127.0.0.1", 40001)),
        ("radixfleet+http://[::1]:5/", Target("::1", 5)),
        ("vllm+http://h:8000", Target("h", 8000, "vllm")),
        ("vllm+http://h:8000?role=decode", Target("h", 8000, "vllm", "decode", transfer="nixl")),
        ("vllm+http://h:8000?role=prefill&transfer=mooncake", Target("h", 8000, "vllm", "prefill", transfer="mooncake", bootstrap=8998)),
        (
            "sglang+http://h:30000?role=prefill&bootstrap=8997&events=5557&replay=5657&service=s&revision=r&tokenizer=/m&key_env=RADIXFLEET_WORKER_KEY",
            Target("h", 30000, "sglang", "prefill", "s", "r", "", 8997, 5557, 5657, "/m", "RADIXFLEET_WORKER_KEY"),
        ),
        ("sglang+http://h:30000?role=prefill", Target("h", 30000, "sglang", "prefill", bootstrap=8998)),
    ],
)
def test_a_worker_s_url_says_where_and_what_it_is(url: str, target: Target, settings_of: Callable[..., Settings]) -> None:
    assert parse_target(url) == target
    assert settings_of("--static", url).static == (url,)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://h:1", "is allowed"),
        ("tgi+http://h:1", "vllm+http://HOST:PORT"),
        ("vllm+http://h", "HOST:PORT"),
        ("vllm+http://h:99999", "ort"),
        ("vllm+http://u:p@h:1", "HOST:PORT"),
        ("vllm+http://h:1/v1", "HOST:PORT"),
        ("http://h:1?role=decode", "our runtime tells everything itself"),
        ("vllm+http://h:1?role=chef", "prefill, decode, unified"),
        ("vllm+http://h:1?events=0", "between 1 and 65535"),
        ("vllm+http://h:1?evnts=5557", "'evnts' is not known"),
        ("vllm+http://h:1?role=decode&role=prefill", "given twice"),
        ("vllm+http://h:1?transfer=rdma", "nixl or mooncake"),
        ("vllm+http://h:1?key_env=AWS_SECRET_ACCESS_KEY", "begins with RADIXFLEET_WORKER_KEY"),
        ("sglang+http://h:1?transfer=nixl", "for others nothing"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_allowed(url: str, said: str, settings_of: Callable[..., Settings]) -> None:
    with pytest.raises(BadFlag) as e:
        settings_of("--static", url)
    assert said in str(e.value) and "--static has" in str(e.value)


def test_one_address_is_one_worker(settings_of: Callable[..., Settings]) -> None:
    with pytest.raises(BadFlag, match="h:1 more than once"):
        settings_of("--static", "http://h:1,vllm+http://h:1")
    assert settings_of("--static", "").static == ()


@pytest.mark.parametrize(
    ("body", "target"),
    [
        ({"url": "http://h:1", "engine": "vllm", "role": "decode"}, Target("h", 1, "vllm", "decode", transfer="nixl")),
        ({"url": "vllm+http://h:1?role=decode", "engine": "vllm", "events": 5557}, Target("h", 1, "vllm", "decode", transfer="nixl", events=5557)),
        ({"url": "http://h:1", "engine": "radixfleet"}, Target("h", 1)),
        ({"url": "http://h:1"}, Target("h", 1)),
    ],
)
def test_a_body_names_a_worker_by_fields_or_by_url(body: dict[str, Any], target: Target) -> None:
    assert read_target(json.dumps(body).encode()) == target


@pytest.mark.parametrize("body", [b"[]", b"{", b"{}", b'{"url": 5}', b'{"url":"http://h:1","engine":7}', b'{"url":"http://h:1","role":["x"]}'])
def test_a_wrong_body_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as e:
        read_target(body)
    assert e.value.status == 400


@pytest.mark.processes
@pytest.mark.rule("R40")
async def test_r40_workers_come_drain_and_go_over_rest(make_router: Callable[..., Awaitable[RouterProcess]], start_engine: Start) -> None:
    router = await make_router("--static", "", ready=False)
    first, second = await start_engine(FakeVllm(timing=Timing(step_s=0.02))), await start_engine(FakeVllm())

    async def call(method: str, path: str, body: Any = None) -> httpx.Response:
        return await router.http.request(method, router.control + path, json=body)

    added = await call("POST", "/workers", {"url": f"http://127.0.0.1:{first.port}", "engine": "vllm"})
    id1 = f"127.0.0.1:{first.port}"
    assert added.status_code == 201 and added.json()["id"] == id1 and "restarts" in added.json()["kept"]
    assert (await call("POST", "/workers", {"url": first.url()})).json()["error"]["code"] == "worker_exists"
    assert (await call("POST", "/workers", {"url": "ftp://x"})).status_code == 400
    assert (await call("DELETE", "/workers/nobody")).status_code == 404
    await until_async(router.is_ready, "the router is ready")
    body = {"model": "org/tiny", "messages": [], "stream": True, "max_tokens": 30}
    stream = asyncio.create_task(router.http.post(f"{router.url}/v1/chat/completions", json=body))
    await until(lambda: first.running == 1, "a stream runs")
    drained = await call("POST", f"/workers/{quote(id1)}/drain")
    assert drained.json() == {"id": id1, "engine": "vllm", "role": "unified", "state": "draining", "inflight": 1}
    assert (await call("POST", "/workers", {"url": second.url()})).status_code == 201
    await router.until_workers(1)
    for _ in range(3):
        assert (await router.http.post(f"{router.url}/v1/chat/completions", json={**body, "stream": False})).status_code == 200
    assert (first.starts, second.starts) == (1, 3)
    assert (await call("DELETE", f"/workers/{quote(id1)}/drain")).json()["state"] == "ready"
    assert (await call("DELETE", f"/workers/{quote(id1)}")).json()["state"] == "removed"
    answer = await stream
    assert answer.status_code == 200 and answer.content.endswith(b"data: [DONE]\n\n")  # what runs is not cut
    await router.until_idle()
    assert [w["address"] for w in (await router.get("/workers"))["workers"]] == [f"127.0.0.1:{second.port}"]


async def test_our_own_worker_can_be_drained_too(make_worker: MakeWorker, make_fleet: Any) -> None:
    worker: FakeWorker = await make_worker()
    fleet = await make_fleet(worker, queue_timeout=0.1)
    fleet.edge.registry.drain(f"127.0.0.1:{worker.port}", is_drained=True)
    assert fleet.told()[0]["state"] == "draining"
    assert (await fleet.chat()).status_code == 503
    fleet.edge.registry.drain(f"127.0.0.1:{worker.port}", is_drained=False)
    assert (await fleet.chat()).status_code == 200


async def test_a_worker_that_drains_and_ends_is_not_draining_for_ever(make_worker: MakeWorker, make_fleet: Any) -> None:
    worker: FakeWorker = await make_worker()
    fleet = await make_fleet(worker)

    async def says_draining() -> bool:
        await worker.publish(draining=True)
        return bool(fleet.told()[0]["state"] == "draining")

    await until_async(says_draining, "it says that it drains")
    await worker.stop()
    await until(lambda: fleet.told()[0]["state"] == "stalled", "it has ended")
    assert "connection refused" in fleet.told()[0]["reason"]


@pytest.mark.rule("R34")
async def test_workers_that_were_named_and_never_answered_are_listed_with_the_cause(make_worker: MakeWorker, make_fleet: Any) -> None:
    worker: FakeWorker = await make_worker()
    data_port: FakeWorker = await make_worker()
    simple = data_port._simple
    data_port._simple = lambda request: (404, b"{}", "application/json") if request.path == "/worker" else simple(request)  # type: ignore[method-assign]
    with held_port() as dead:
        urls = (worker.url, f"http://127.0.0.1:{dead}", data_port.url)
        fleet = await make_fleet(wait=False, static=urls)
        await until(lambda: len(fleet.told()) == 3 and fleet.ready() == 1, "all are listed")
        told = {w["address"]: (w["state"], w["reason"]) for w in fleet.told()}
    assert told[f"127.0.0.1:{worker.port}"] == ("ready", "")
    state, reason = told[f"127.0.0.1:{dead}"]
    assert state == "starting" and reason == f"worker 127.0.0.1:{dead} could not be reached: connection refused"
    state, reason = told[f"127.0.0.1:{data_port.port}"]
    assert state == "starting" and "give the internal port" in reason
    lines = picture(overview.overview(fleet.brain, fleet.brain.counters.snapshot(SHOWN)), None, 0)
    assert f"127.0.0.1:{dead} is starting: worker 127.0.0.1:{dead} could not be reached: connection refused" in lines
