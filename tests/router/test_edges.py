"""Several edges and one brain, as processes: one router from outside, and whatever is killed, the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fleet_router.settings import BadFlag, Settings
from fleet_router.supervisor import CannotStart, beside, reserve
from fleet_testing.fake_worker import DEFAULT_STREAM, FakeWorker, Script, sse
from fleet_testing.router_fleet import MakeWorker
from fleet_testing.router_process import RouterProcess, until, until_async

MakeRouter = Callable[..., Awaitable[RouterProcess]]
EDGE, BRAIN, CONTROL = "fleet_router.edge.edge", "fleet_router.brain.process", "fleet_router.control.control"
PIECES = [sse({"t": 1}, done=False), sse({"t": 2})]


class Fresh:
    """Chats on a connection of their own each: the kernel gives them to any edge."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self.http = httpx.AsyncClient(timeout=20.0, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    async def __aenter__(self) -> Fresh:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.aclose()

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post(f"{self.router.url}/v1/chat/completions", json=body)

    async def chats(self, count: int) -> list[int]:
        return [r.status_code for r in await asyncio.gather(*(self.chat(f"chat {n}") for n in range(count)))]


async def streams(fresh: Fresh, workers: list[FakeWorker], count: int) -> tuple[list[asyncio.Task[httpx.Response]], asyncio.Event]:
    """So many streams that have their first event and wait for the rest until the event is set."""
    go = asyncio.Event()
    for w in workers:
        w.scripts.extend(Script(pieces=PIECES, wait_after=(1, go)) for _ in range(count))
    before = sum(len(w.legs) for w in workers)
    tasks = [asyncio.create_task(fresh.chat(f"stream {n}", stream=True)) for n in range(count)]
    await until(lambda: sum(len(w.legs) for w in workers) == before + count, "all streams run")
    for w in workers:
        w.scripts.clear()
    return tasks, go


def served_by(router: RouterProcess, edge: psutil.Process) -> int:
    """Clients that are connected to an edge now."""
    return sum(c.status == "ESTABLISHED" and c.laddr.port == router.data_port for c in edge.net_connections("tcp4"))


async def make_two(make_router: MakeRouter, workers: list[FakeWorker], *flags: str) -> RouterProcess:
    router = await make_router("--workers", "2", "--static", ",".join(w.url for w in workers), *flags)
    await router.until_workers(len(workers))
    await until_async(lambda: gauge(router, "edges", 2), "both edges are here")
    return router


async def gauge(router: RouterProcess, name: str, value: float) -> bool:
    return (await router.metrics()).get(name) == value


def requests_total(metrics: dict[str, float]) -> float:
    return sum(v for name, v in metrics.items() if name.startswith('requests_total{path="/v1/chat'))


@pytest.mark.processes
async def test_two_edges_and_a_brain_are_one_router(make_worker: MakeWorker, make_router: MakeRouter, tmp_path: Path) -> None:
    """And what their processes have loaded, at their end: no edge loads what the brain decides with, none of them a web framework."""
    hook, out = tmp_path / "hook", tmp_path / "modules"
    hook.mkdir()
    hook.joinpath("sitecustomize.py").write_text(
        "import os, sys\n_exit = os._exit\n"
        f"def leave(code):\n    open({str(out)!r} + '.' + str(os.getpid()), 'w').write('\\n'.join(sys.modules))\n    _exit(code)\n"
        "os._exit = leave\n"
    )
    workers = [await make_worker("prefill"), await make_worker("decode")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")])))
        router = await make_two(make_router, workers, "--router-id", "r1")
    edges, brain = router.children(EDGE), router.child(BRAIN)
    assert len(edges) == 2 and brain is not None
    idle = [await asyncio.open_connection("127.0.0.1", router.data_port) for _ in range(40)]
    await until(lambda: all(served_by(router, e) > 0 for e in edges), "the kernel spreads connections over both")
    for _, writer in idle:
        writer.transport.abort()
    async with Fresh(router) as fresh:
        assert await fresh.chats(20) == [200] * 20
        assert (await fresh.chat(stream=True)).content == DEFAULT_STREAM
        assert (await fresh.chat("x" * 20_000)).status_code == 200
        assert (await fresh.http.get(f"{router.url}/v1/models")).json()["data"][0]["id"]
        assert (await fresh.http.get(f"{router.url}/readyz")).json()["status"] == "ready"
    report = await router.get("/fleet/demo/tiny")
    assert (report["routerId"], report["synced"]) == ("r1", True)
    assert {w["role"] for w in report["revisions"]["aaaaaaaa"]["workers"]} == {"prefill", "decode"}
    probe = await router.http.post(f"{router.control}/fleet/demo/tiny/probe", json={"revision": "aaaaaaaa"})
    assert probe.json()["ok"], probe.text
    explained = await router.http.post(f"{router.control}/debug/route", json={"model": "tiny", "prompt": "x"})
    assert {w["role"] for w in explained.json()["workers"]} == {"prefill", "decode"}
    assert (await router.http.post(f"{router.control}/debug/route", json={"model": "none", "prompt": "x"})).status_code == 404
    assert len((await router.get("/debug/route"))["decisions"]) == 23
    await until_async(lambda: has_requests(router, 22), "the edges' counters are added up")
    await router.until_idle()
    assert (await router.metrics())['picks_total{role="decode"}'] == 23
    assert await router.stop() == 0
    frameworks = {"pydantic", "fastapi", "httpx", "starlette", "uvicorn", "kubernetes", "aiohttp", "torch", "transformers"}
    for process, more in ((edges[0], {"numpy", "zmq"}), (edges[1], {"numpy", "zmq"}), (brain, set[str]())):
        modules = Path(f"{out}.{process.pid}").read_text().split("\n")
        assert "fleet_router.link" in modules
        assert {m.split(".")[0] for m in modules}.isdisjoint(frameworks | more)


async def has_requests(router: RouterProcess, count: int) -> bool:
    return requests_total(await router.metrics()) == count


@pytest.mark.processes
@pytest.mark.rule("R30")
async def test_r30_a_killed_brain_costs_no_request_and_the_next_one_knows_what_runs(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    workers = [await make_worker(), await make_worker()]
    router = await make_two(make_router, workers)
    async with Fresh(router) as fresh:
        tasks, go = await streams(fresh, workers, 6)
        statuses: list[int] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                statuses.append((await fresh.chat(f"load {len(statuses)}")).status_code)

        loads = [asyncio.create_task(load()) for _ in range(2)]
        brain = router.child(BRAIN)
        assert brain is not None
        await asyncio.to_thread(brain.kill)
        await asyncio.to_thread(brain.wait)

        async def degraded() -> bool:
            response = await router.http.get(f"{router.control}/readyz")
            assert response.status_code == 200, response.text
            return bool(response.json()["status"] == "degraded" and "simple rule" in response.json()["detail"])

        async def decides() -> bool:
            metrics = await router.metrics()
            return metrics.get('picks_total{role="unified"}', 0) > 0 and metrics["edges"] == 2 and await router.is_ready()

        await until_async(degraded, "the edges say that they have no brain")
        await until_async(decides, "a new brain decides", 5.0)
        assert (await router.http.get(f"{router.control}/readyz")).json()["status"] == "ready"
        assert (await router.get("/fleet/demo/tiny"))["synced"] is True
        stop.set()
        await asyncio.gather(*loads)
        assert set(statuses) == {200}
        await until_async(lambda: gauge(router, "inflight", 6), "the new brain counts the streams of before, and nothing else")
        go.set()
        assert [r.content for r in await asyncio.gather(*tasks)] == [b"".join(PIECES)] * 6
        await router.until_idle()

    async def counted() -> bool:  # edges tell their counters once a second
        metrics = await router.metrics()
        return metrics.get("safe_picks_total", 0) >= 1 and metrics.get("brain_lost_total", 0) >= 2 and metrics["waiting"] == 0

    await until_async(counted, "what the edges did alone is counted", 10)
    assert all(w["inflight"] == w["pend"] == w["run"] == 0 for w in (await router.get("/workers"))["workers"])
    children = psutil.Process(router.process.pid).children()
    os.kill(router.process.pid, signal.SIGKILL)
    await all_gone(children)


@pytest.mark.processes
@pytest.mark.rule("R16")
@pytest.mark.rule("R38")
async def test_a_killed_edge_takes_only_its_own_clients_with_it_and_a_drain_takes_none(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    workers = [await make_worker()]
    router = await make_two(make_router, workers)
    async with Fresh(router) as fresh:
        tasks, go = await streams(fresh, workers, 12)
        edges = router.children(EDGE)
        mine = [served_by(router, e) for e in edges]
        assert sum(mine) == 12
        await fresh.chats(4)
        await until_async(lambda: has_requests(router, 4), "the counters are told")
        await asyncio.to_thread(edges[0].kill)
        await asyncio.to_thread(edges[0].wait)
        assert await asyncio.wait_for(fresh.chats(30), 15) == [200] * 30, "no connection is given to the dead one"
        await until_async(lambda: gauge(router, "inflight", mine[1]), "its requests are not counted any more")
        await until(lambda: len(router.children(EDGE)) == 2, "it is started again")
        await until_async(lambda: gauge(router, "edges", 2), "the new edge is here")
        go.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        whole = [r for r in ended if isinstance(r, httpx.Response) and r.content == b"".join(PIECES)]
        cut = [r for r in ended if isinstance(r, httpx.HTTPError)]
        assert (len(cut), len(whole)) == (mine[0], mine[1])
        assert await fresh.chats(10) == [200] * 10
        await until_async(lambda: has_requests(router, 4 + 30 + mine[1] + 10), "what the dead edge counted stays counted")
        await router.until_idle()
        await drains_without_a_loss(router, fresh, workers)


@pytest.mark.processes
async def test_a_second_signal_ends_all_processes_at_once(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    workers = [await make_worker()]
    router = await make_two(make_router, workers)
    children = psutil.Process(router.process.pid).children()
    async with Fresh(router) as fresh:
        tasks, _ = await streams(fresh, workers, 2)
        router.process.send_signal(signal.SIGTERM)
        await until(lambda: "draining" in router.log.read_text(), "it drains")
        router.process.send_signal(signal.SIGTERM)
        await until(lambda: router.process.poll() is not None, "the router ends", 5)
        await asyncio.gather(*tasks, return_exceptions=True)
    assert router.process.returncode == 1
    await all_gone(children)


async def all_gone(children: list[psutil.Process]) -> None:
    gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
    assert len(gone) == 4 and not alive


async def drains_without_a_loss(router: RouterProcess, fresh: Fresh, workers: list[FakeWorker]) -> None:
    """SIGTERM while streams run: edges, then control, then the brain."""
    tasks, go = await streams(fresh, workers, 8)
    brain, log_before = router.child(BRAIN), router.log.read_text()
    assert brain is not None
    router.process.send_signal(signal.SIGTERM)

    async def refused() -> bool:
        with contextlib.suppress(ConnectionResetError):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", router.data_port)
            except ConnectionRefusedError:
                return True
            writer.close()
        return False

    await until_async(refused, "no edge accepts any more")
    ready = await router.http.get(f"{router.control}/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    assert brain.is_running() and not any(t.done() for t in tasks)
    go.set()
    assert [r.content for r in await asyncio.gather(*tasks)] == [b"".join(PIECES)] * 8
    await until(lambda: router.process.poll() is not None, "the router ends")
    assert router.process.returncode == 0
    log = router.log.read_text().removeprefix(log_before)
    assert "is restarted" not in log and "deciding process is gone" not in log


def test_a_port_that_another_router_has_is_not_shared_with_it() -> None:
    held = reserve("127.0.0.1", 0, "--data-port")
    port = held.getsockname()[1]
    with beside(held) as edge, beside(held) as other:
        edge.listen()
        other.listen()
        with pytest.raises(CannotStart, match=f"--data-port 127.0.0.1:{port} cannot be bound"):
            reserve("127.0.0.1", port, "--data-port")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))  # what is held does not take connections that nobody would accept
    with beside(held) as again:
        again.listen()
        socket.create_connection(("127.0.0.1", port)).close()
    held.close()


@pytest.mark.parametrize(("text", "workers"), [("1", 1), ("64", 64)])
def test_the_number_of_edges_is_a_flag(text: str, workers: int, settings_of: Callable[..., Settings]) -> None:
    assert settings_of("--static", "http://a:1", "--workers", text).workers == workers


def test_auto_is_one_edge_for_each_cpu_that_the_process_may_use(settings_of: Callable[..., Settings]) -> None:
    assert 1 <= settings_of("--static", "http://a:1", "--workers", "auto").workers <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("text", ["0", "65", "x", "-1", "1.5", ""])
def test_a_wrong_number_of_edges_is_refused(text: str, settings_of: Callable[..., Settings]) -> None:
    with pytest.raises(BadFlag, match="a number between 1 and 64, or auto"):
        settings_of("--static", "http://a:1", f"--workers={text}")
