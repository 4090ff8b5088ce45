"""Asking routers over real sockets: reports within a second whatever the router does, probes, and what a bad answer means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from fleet_operator.facts import Key, ProbeResult
from fleet_operator.routers import HttpRouters, Prober, error_text, read_report, running_routers

KEY = Key("demo", "chat")
WORKER = {"podUid": "u", "pod": "p", "role": "prefill", "rank": 0, "state": "ready", "inflight": 2, "drainDeadline": None}


class FakeRouter:
    """A control port on loopback that answers what a test says."""

    def __init__(self) -> None:
        self.answer: Any = {"routerId": "r", "synced": True, "revisions": {}}
        self.status = 200
        self.is_frozen = False
        self.asked: list[str] = []
        self.release = asyncio.Event()
        self.port = 0

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path} {await request.text()}".strip())
        if self.is_frozen:
            await self.release.wait()
        if isinstance(self.answer, bytes):
            return web.Response(body=self.answer, status=self.status)
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    found = FakeRouter()
    runner = await found.start()
    yield found
    found.release.set()
    await runner.cleanup()


@pytest.fixture
async def routers(router: FakeRouter) -> AsyncIterator[HttpRouters]:
    found = HttpRouters(control_port=router.port)
    yield found
    await found.close()


def pod(name: str = "router-0", ip: str = "127.0.0.1", phase: str = "Running") -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"podIP": ip, "phase": phase}}


async def test_a_report_is_read_and_unknown_fields_are_ignored(router: FakeRouter, routers: HttpRouters) -> None:
    router.answer = {"synced": True, "new": 1, "revisions": {"ab": {"weight": 100, "workers": [{**WORKER, "mood": "fine"}]}}}
    (report,) = await routers.reports(KEY, [pod()])
    assert router.asked == ["GET /fleet/demo/chat"] and not report.error and report.is_synced
    worker = report.worker("u")
    assert worker is not None and (worker.state, worker.inflight, worker.drain_deadline) == ("ready", 2, None)
    assert report.is_routing("ab", frozenset({"prefill"})) and not report.is_routing("ab", frozenset({"prefill", "decode"}))


async def test_a_frozen_router_costs_one_second_however_many_there_are(router: FakeRouter, routers: HttpRouters) -> None:
    router.is_frozen = True
    began = time.monotonic()
    reports = await routers.reports(KEY, [pod(f"router-{i}") for i in range(5)])
    assert time.monotonic() - began < 3
    assert all(r.error and not r.is_synced for r in reports)


@pytest.mark.parametrize(
    ("answer", "status"), [(b"not json", 200), ([1], 200), ({}, 500), ({"revisions": {"a": {"workers": [{"inflight": "x"}]}}}, 200)]
)
async def test_an_answer_that_is_no_report_is_an_error_of_that_router_only(
    router: FakeRouter, routers: HttpRouters, answer: Any, status: int
) -> None:
    router.answer, router.status = answer, status
    (report,) = await routers.reports(KEY, [pod()])
    assert report.error


async def test_a_router_that_refuses_the_connection_is_an_error(routers: HttpRouters) -> None:
    (report,) = await routers.reports(KEY, [pod(ip="127.0.0.2")])
    assert report.error or not report.is_synced


def test_missing_fields_get_defaults_and_ranks_of_a_pod_are_one_worker() -> None:
    assert not read_report("r", "a", {}).is_synced
    two = {"a": {"workers": [WORKER, {**WORKER, "rank": 1, "state": "starting", "inflight": 3}]}}
    worker = read_report("r", "a", {"synced": True, "revisions": two}).worker("u")
    assert worker is not None and (worker.state, worker.inflight) == ("starting", 5)


def test_only_router_pods_that_can_hold_a_request_are_asked() -> None:
    pods = [
        pod("b"),
        pod("a"),
        pod("done", phase="Succeeded"),
        pod("dead", phase="Failed"),
        {"metadata": {"name": "new"}, "status": {"phase": "Pending"}},
    ]
    assert [p["metadata"]["name"] for p in running_routers(pods)] == ["a", "b"]


async def test_a_probe_posts_the_revision_and_reads_the_answer(router: FakeRouter, routers: HttpRouters) -> None:
    router.answer = {"ok": True, "error": None, "ttftMs": 5}
    address = f"127.0.0.1:{router.port}"
    assert await routers.probe(KEY, address, "ab") == ProbeResult(True)
    assert router.asked == ['POST /fleet/demo/chat/probe {"revision": "ab"}']
    router.answer = {"ok": False, "error": {"message": "no free pages"}}
    assert await routers.probe(KEY, address, "ab") == ProbeResult(False, "no free pages")
    router.answer, router.status = {"error": {"message": "x"}}, 404
    assert not (await routers.probe(KEY, address, "ab")).is_ok


@pytest.mark.parametrize(
    ("error", "text"), [(None, ""), ("x", "x"), ({"message": "m"}, "m"), ({"error": {"message": "m"}}, "m"), ({"error": "e"}, "e"), (3, "3")]
)
def test_errors_of_probes_are_read_in_any_shape(error: Any, text: str) -> None:
    assert error_text(error) == text


class Answers:
    """Routers whose probes answer at once."""

    def __init__(self) -> None:
        self.result, self.asked = ProbeResult(True), 0

    async def probe(self, key: Key, address: str, revision: str) -> ProbeResult:
        self.asked += 1
        return self.result

    async def reports(self, key: Key, pods: Any) -> tuple[()]:
        return ()


async def test_the_prober_asks_once_retries_later_and_asks_anew_after_forgetting() -> None:
    now, answers, enqueued = 0.0, Answers(), []
    prober = Prober(answers, enqueued.append, clock=lambda: now)

    async def want() -> None:
        prober.want(KEY, "uid", "ab", "address")
        for _ in range(3):
            await asyncio.sleep(0)

    answers.result = ProbeResult(False, "no")
    await want()
    await want()
    assert answers.asked == 1 and prober.results("uid") == {"ab": ProbeResult(False, "no")} and enqueued == [KEY]
    now, answers.result = 1.5, ProbeResult(True)
    await want()
    await want()
    assert answers.asked == 2 and prober.results("uid") == {"ab": ProbeResult(True)}
    prober.forget("uid", keep=frozenset({"ab"}))
    await want()
    assert answers.asked == 2
    prober.forget("uid")
    await want()
    assert answers.asked == 3
