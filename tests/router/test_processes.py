"""The router as it is run: three processes, real signals, real ports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from fleet_router import settings as router_settings
from fleet_router.__main__ import main
from fleet_testing.fake_worker import DEFAULT_STREAM, Script, sse
from fleet_testing.router_fleet import MakeWorker
from fleet_testing.router_process import RouterProcess, held_port, spawn, until, until_async

pytestmark = pytest.mark.processes

MakeRouter = Callable[..., Awaitable[RouterProcess]]


async def run(*flags: str) -> tuple[int, str, str]:
    """A router that is expected to end by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fleet_router", *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_edge_process_loads_no_pydantic_fastapi_or_httpx(make_worker: MakeWorker, make_router: MakeRouter, tmp_path: Path) -> None:
    """The real edge process writes its modules at its end; it has served requests, a probe and metrics before."""
    hook, out = tmp_path / "hook", tmp_path / "modules"
    hook.mkdir()
    hook.joinpath("sitecustomize.py").write_text(
        "import os, sys\n_exit = os._exit\n"
        f"def leave(code):\n    open({str(out)!r} + '.' + str(os.getpid()), 'w').write('\\n'.join(sys.modules))\n    _exit(code)\n"
        "os._exit = leave\n"
    )
    worker = await make_worker()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(hook), before]))
    try:
        router = await make_router("--static", worker.url)
    finally:
        os.environ["PYTHONPATH"] = before or ""
    await router.until_workers(1)
    edge = router.child("fleet_router.edge.edge")
    assert edge is not None
    assert (await router.chat(stream=True)).content == DEFAULT_STREAM
    assert (await router.chat("x" * 20_000)).status_code == 200
    await router.http.post(f"{router.control}/fleet/demo/tiny/probe", json={"revision": "aaaaaaaa"})
    await router.metrics()
    assert await router.stop() == 0
    modules = Path(f"{out}.{edge.pid}").read_text().split("\n")
    assert "fleet_router.edge.edge" in modules or "fleet_router.brain.brain" in modules
    roots = {m.split(".")[0] for m in modules}
    assert roots.isdisjoint({"pydantic", "fastapi", "httpx", "starlette", "uvicorn", "kubernetes", "aiohttp", "torch", "transformers"})


async def test_control_port_answers_with_the_table(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    router = await make_router("--static", f"{prefill.url},{decode.url}", "--router-id", "r1")
    await router.until_workers(2)
    assert (await router.chat(stream=True)).content == DEFAULT_STREAM
    report = await router.get("/fleet/demo/tiny")
    assert (report["routerId"], report["synced"]) == ("r1", True)
    listed = {w["podUid"]: (w["role"], w["state"], w["inflight"], w["drainDeadline"]) for w in report["revisions"]["aaaaaaaa"]["workers"]}
    assert listed == {
        prefill.record.pod_uid: ("prefill", "ready", 0, None),
        decode.record.pod_uid: ("decode", "ready", 0, None),
    }
    assert (await router.get("/fleet/demo/none"))["revisions"] == {}
    probe = await router.http.post(f"{router.control}/fleet/demo/tiny/probe", json={"revision": "aaaaaaaa"})
    assert probe.status_code == 200 and probe.json()["ok"] and probe.json()["ttftMs"] > 0
    for body in (b"{", b"[]", b'{"revision": 5}'):
        probe = await router.http.post(f"{router.control}/fleet/demo/tiny/probe", content=body)
        assert probe.status_code == 200 and not probe.json()["ok"] and "revision" in probe.json()["error"]
    explained = await router.http.post(f"{router.control}/debug/route", json={"model": "tiny", "prompt": "x"})
    assert {w["role"] for w in explained.json()["workers"]} == {"prefill", "decode"}
    decisions = (await router.get("/debug/route"))["decisions"]
    assert len(decisions) == 2
    metrics = await router.metrics()
    assert metrics["up"] == 1 and metrics['workers{state="ready"}'] == 2 and metrics['picks_total{role="decode"}'] == 2


async def test_control_port_errors_have_the_one_shape(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    router = await make_router("--static", (await make_worker()).url, "--max-body-bytes", "2000")
    await router.until_workers(1)
    http, base = router.http, router.control
    answers = [
        (await http.get(f"{base}/nope"), 404),
        (await http.post(f"{base}/livez"), 405),
        (await http.post(f"{base}/debug/route", content=b"{"), 400),
        (await http.post(f"{base}/debug/route", json={"model": "none", "prompt": "x"}), 404),
        (await http.post(f"{base}/debug/route", content=b"x" * 3000), 413),
    ]
    for response, status in answers:
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "code", "param", "request_id"}


@pytest.mark.parametrize("name", ["edge.edge", "control.control"])
async def test_a_killed_child_is_restarted_on_its_port(name: str, make_worker: MakeWorker, make_router: MakeRouter) -> None:
    worker = await make_worker()
    router = await make_router("--static", worker.url)
    await router.until_workers(1)
    old = router.child(f"fleet_router.{name}")
    assert old is not None
    worker.default = Script(pieces=[sse({"t": n}, done=False) for n in range(30)] + [b"data: [DONE]\n\n"], wait_after=(1, (go := asyncio.Event())))
    stream = asyncio.create_task(router.chat(stream=True))
    await until(lambda: bool(worker.legs), "a stream runs")
    await asyncio.to_thread(old.kill)
    await until(lambda: (new := router.child(f"fleet_router.{name}")) is not None and new.pid != old.pid, "it is started again")
    go.set()
    if name == "control.control":
        assert (await stream).content.endswith(b"data: [DONE]\n\n")  # the data path did not notice
    else:
        with pytest.raises(httpx.HTTPError):
            await stream
    worker.default = Script()
    await until_async(router.is_ready, "ready again")
    await router.until_workers(1)
    assert (await router.chat()).status_code == 200
    assert (await router.get("/fleet/demo/tiny"))["synced"] is True
    assert "it is restarted" in router.log.read_text()


async def test_without_an_edge_the_control_port_says_so(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    router = await make_router("--static", (await make_worker()).url)
    edge = router.child("fleet_router.edge.edge")
    assert edge is not None
    edge.suspend()
    try:
        assert (await router.http.get(f"{router.control}/livez")).status_code == 200
        response = await router.http.get(f"{router.control}/readyz")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "brain_away")
        assert (await router.metrics())["up"] == 0
    finally:
        edge.resume()
    await until_async(router.is_ready, "ready again")


@pytest.mark.rule("R38")
async def test_sigterm_finishes_streams_refuses_new_clients_and_exits_0(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    worker = await make_worker()
    router = await make_router("--static", worker.url)
    await router.until_workers(1)
    go = asyncio.Event()
    worker.default = Script(wait_after=(1, go), pieces=[sse({"t": 1}, done=False), b"data: [DONE]\n\n"])
    stream = asyncio.create_task(router.chat(stream=True))
    await until(lambda: bool(worker.legs), "a stream runs")
    router.process.send_signal(signal.SIGTERM)

    async def refused() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", router.data_port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    await until_async(refused, "no new connection is accepted")
    ready = await router.http.get(f"{router.control}/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    assert not stream.done()
    go.set()
    assert (await stream).content == sse({"t": 1})
    await until(lambda: router.process.poll() is not None, "the router ends")
    assert router.process.returncode == 0


@pytest.mark.rule("R38")
async def test_the_drain_has_a_limit_and_the_workers_hear_of_what_was_cut(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    worker = await make_worker()
    router = await make_router("--static", worker.url, "--drain-timeout", "0.5")
    await router.until_workers(1)
    worker.default = Script(wait=asyncio.Event())
    stream = asyncio.create_task(router.chat(stream=True))
    await until(lambda: bool(worker.legs), "a request runs")
    router.process.send_signal(signal.SIGTERM)
    with pytest.raises(httpx.HTTPError):
        await stream
    await until(lambda: router.process.poll() is not None, "the router ends")
    assert router.process.returncode == 0
    assert worker.aborts == [worker.legs[0].routed.rid]


async def test_with_a_drain_delay_the_router_accepts_while_it_is_not_ready(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    router = await make_router("--static", (await make_worker()).url, "--drain-delay", "3")
    await router.until_workers(1)
    router.process.send_signal(signal.SIGTERM)

    async def not_ready() -> bool:
        return (await router.http.get(f"{router.control}/readyz")).status_code == 503

    await until_async(not_ready, "not ready")
    assert (await router.chat()).status_code == 200
    await until(lambda: router.process.poll() is not None, "the router ends")
    assert router.process.returncode == 0


async def test_a_second_signal_ends_everything_at_once(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    worker = await make_worker()
    router = await make_router("--static", worker.url)
    await router.until_workers(1)
    children = psutil.Process(router.process.pid).children()
    worker.default = Script(wait=asyncio.Event())
    stream = asyncio.create_task(router.chat())
    await until(lambda: bool(worker.legs), "a request runs")
    router.process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.2)
    assert router.process.poll() is None
    router.process.send_signal(signal.SIGINT)
    await until(lambda: router.process.poll() is not None, "the router ends", limit_s=3)
    assert router.process.returncode == 1
    assert not [c for c in children if c.is_running()]
    with pytest.raises(httpx.HTTPError):
        await stream


async def test_a_killed_supervisor_leaves_no_child_behind(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    router = await make_router("--static", (await make_worker()).url)
    children = psutil.Process(router.process.pid).children()
    assert len(children) == 2
    os.kill(router.process.pid, signal.SIGKILL)
    router.process.wait(10)
    gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
    assert len(gone) == 2 and not alive


@pytest.mark.rule("R40")
async def test_workers_may_come_after_the_router(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    with held_port() as port:
        router = await make_router("--static", f"http://127.0.0.1:{port}", ready=False)

        async def not_synced() -> bool:
            try:
                return (await router.http.get(f"{router.control}/readyz")).json()["status"] == "syncing"
            except (httpx.HTTPError, KeyError):
                return False

        await until_async(not_synced, "the router says that it has no worker yet")
        response = await router.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_synced")
        await make_worker(port=port)
        await router.until_workers(1)
        assert (await router.chat()).status_code == 200


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--kubernetes and --static"),
        (["--kubernetes", "--static", "http://127.0.0.1:1"], "--kubernetes and --static"),
        (["--kubernetes"], "outside a cluster give --kubeconfig FILE"),
        (["--static", "127.0.0.1:1"], "http://HOST:PORT"),
        (["--static", "http://127.0.0.1"], "http://HOST:PORT"),
        (["--static", "http://127.0.0.1:99999"], "--static"),
        (["--static", "http://127.0.0.1:1", "--data-port", "70000"], "between 0 and 65535"),
        (["--static", "http://127.0.0.1:1", "--queue-timeout", "31"], "at most 30"),
        (["--static", "http://127.0.0.1:1", "--body-timeout", "soon"], "--body-timeout"),
        (["--static", "http://127.0.0.1:1", "--no-such-flag"], "--no-such-flag"),
        (["--static", "http://127.0.0.1:1", "--router-id", "a b"], "--router-id"),
        (["--static", "http://127.0.0.1:1", "--kubeconfig", "x"], "--kubeconfig needs --kubernetes"),
    ],
)
def test_a_wrong_flag_stops_the_start_with_a_sentence(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = main(flags), capsys.readouterr().err
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1


async def test_a_taken_port_stops_the_start_with_a_sentence(make_worker: MakeWorker) -> None:
    worker = await make_worker()
    code, _, err = await run("--static", worker.url, "--host", "127.0.0.1", "--data-port", str(worker.port))
    assert code == 1 and f"--data-port 127.0.0.1:{worker.port} cannot be bound" in err


async def test_help_names_every_flag() -> None:
    code, out, _ = await run("--help")
    assert code == 0
    for field in router_settings.Settings.__struct_fields__:
        assert re.search(rf"--{field.replace('_', '-')}\b", out), field


async def test_a_router_without_an_api_server_serves_its_ports_and_is_not_synced(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    cluster, user = {"server": "http://127.0.0.1:9"}, {"name": "u", "user": {}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    content = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [user], "contexts": [context]}
    kubeconfig.write_text(json.dumps(content | {"clusters": [{"name": "c", "cluster": cluster}]}))
    with socket.create_server(("127.0.0.1", 0)) as s:
        free = ("--peer-port", str(s.getsockname()[1]))
    router = await RouterProcess.start(tmp_path, "--kubernetes", "--kubeconfig", str(kubeconfig), "--drain-delay", "0", *free, ready=False)
    try:

        async def says_syncing() -> bool:
            try:
                response = await router.http.get(f"{router.control}/readyz")
            except httpx.HTTPError:
                return False
            return response.status_code == 503 and response.json().get("status") == "syncing"

        await until_async(says_syncing, "the control port says that it is not synced")
        assert (await router.get("/fleet/demo/chat"))["synced"] is False
        assert (await router.chat()).json()["error"]["code"] == "not_synced"
        await until(lambda: "the API server cannot be read" in router.log.read_text(), "the log says why")
    finally:
        assert await router.stop() == 0


def test_nothing_is_left_in_the_temporary_folder_for_the_link(tmp_path: Path) -> None:
    """The link has an abstract name: a read-only root is enough."""
    log = tmp_path / "log"
    argv = [sys.executable, "-m", "fleet_router", "--static", "http://127.0.0.1:9", "--host", "127.0.0.1", "--control-host", "127.0.0.1"]
    process = spawn([*argv, "--data-port", "0", "--control-port", "0"], log)
    deadline = time.monotonic() + 20
    while "edge serves" not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


async def test_the_edge_may_open_as_many_files_as_the_hard_limit_says(make_router: MakeRouter) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        router = await make_router("--static", "http://127.0.0.1:9", ready=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def limits() -> tuple[int, int] | None:
        edge = router.child("fleet_router.edge.edge")
        return edge.rlimit(psutil.RLIMIT_NOFILE) if edge is not None else None

    await until(lambda: limits() == (hard, hard), "the edge's limit is raised")
