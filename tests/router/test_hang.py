"""A process of the router that hangs is replaced; one that only gets no CPU is not. Real processes; what is counted is a table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fleet_router.hang import LOOK_S, START_S, Sight, Watch, see
from fleet_testing.cheap_worker import CheapWorker, tokenizer_file
from fleet_testing.fake_worker import tiny_tokenizer_zip
from fleet_testing.router_fleet import MakeWorker
from fleet_testing.router_process import RouterProcess, until, until_async

MakeRouter = Callable[..., Awaitable[RouterProcess]]
EDGE, BRAIN, CONTROL = "fleet_router.edge.edge", "fleet_router.brain.process", "fleet_router.control.control"
S = 1_000_000_000


def silence(*sights: Sight | None, beaten: bool = True, step_s: float = 1.0) -> Watch:
    """A process that is seen so, look after look, since its last beat."""
    watch = Watch(0.0)
    if beaten:
        watch.beaten(0.0)
    for n, sight in enumerate(sights, 1):
        watch.silent(n * step_s, sight)
    return watch


@pytest.mark.parametrize(
    ("sights", "silent_s"),
    [
        pytest.param([Sight("T", 5 * S, 0)] * 11, 10, id="stopped"),
        pytest.param([Sight("S", 5 * S, 0)] * 11, 10, id="asleep in a call"),
        pytest.param([Sight("R", n * S, 0) for n in range(11)], 10, id="busy without an end"),
        pytest.param([Sight("R", n * S // 4, n * S * 3 // 4) for n in range(11)], 2.5, id="busy without an end on a quarter of a CPU"),
        pytest.param([Sight("R", 5 * S, 0)] * 11, 0, id="in line for a CPU all the time"),
        pytest.param([Sight("R", n, n * S) for n in range(11)], 0, id="in line, with a moment on the CPU now and then"),
        pytest.param([Sight("R", 5 * S, 0)] * 6 + [Sight("R", 6 * S, 5 * S)], 1, id="in line for long, then on the CPU"),
        pytest.param([Sight("R", (n // 2) * S, (n // 2) * S) for n in range(11)], 5, id="half of the time in line"),
        pytest.param([Sight("D", 5 * S, 0)] * 11, 0, id="waits for a disk"),
        pytest.param([Sight("t", 5 * S, 0)] * 11, 0, id="held by a debugger"),
        pytest.param([None] * 10, 10, id="the kernel tells nothing"),
    ],
)
def test_silence_counts_as_far_as_the_process_could_have_run(sights: list[Sight | None], silent_s: float) -> None:
    watch = silence(*sights)
    assert watch.silent_s == pytest.approx(silent_s)
    assert watch.hangs(silent_s + 0.1) is False and watch.hangs(silent_s - 0.1) is True


def test_a_beat_ends_the_silence() -> None:
    watch = silence(*[Sight("S", 1, 0)] * 10)
    watch.beaten(11.0)
    assert watch.silent_s == 0.0 and not watch.hangs(0.1)


def test_looks_that_come_late_count_as_two_each() -> None:
    """The supervisor had to wait for a CPU itself, or the machine was held."""
    assert silence(*[Sight("S", 1, 0)] * 3, step_s=1000.0).silent_s == 2 * 2 * LOOK_S


def test_before_its_first_beat_a_process_has_a_minute() -> None:
    sights = [Sight("S", 1, 0)] * 31
    assert silence(*sights, beaten=True).hangs(20.0) and not silence(*sights, beaten=False).hangs(20.0)
    assert silence(*sights * 2, beaten=False).hangs(START_S - 1) is True


def test_the_kernel_tells_of_a_process_that_is_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        psutil.Process(process.pid).suspend()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        sight = see(process.pid)
        assert sight is not None and sight.state == "T" and sight.ran_ns > 0
    finally:
        process.kill()
        process.wait()
    assert see(process.pid) is None


def test_what_the_kernel_tells_of_a_process_that_shares_its_cpu_adds_up() -> None:
    """Red when all silence counts."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    try:
        time.sleep(1.0)  # they have started
        watch, first = Watch(began := time.monotonic()), see(processes[0].pid)
        assert first is not None
        watch.beaten(began)
        watch.silent(began, first)
        for _ in range(4):
            time.sleep(LOOK_S)
            last = see(processes[0].pid)
            watch.silent(time.monotonic(), last)
        assert last is not None
        ran_s = (last.ran_ns - first.ran_ns) / S
        assert watch.silent_s <= ran_s + LOOK_S < time.monotonic() - began  # a wait that lasts is not in the kernel's sum yet
    finally:
        for process in processes:
            process.kill()
            process.wait()


# -- processes


@contextlib.contextmanager
def cheap_workers(folder: Path, count: int) -> Iterator[list[CheapWorker]]:
    tokenizer = tokenizer_file(folder, tiny_tokenizer_zip())
    workers = [CheapWorker(folder, tokenizer).start() for _ in range(count)]
    try:
        for worker in workers:
            worker.wait()
        yield workers
    finally:
        for worker in workers:
            worker.end()


async def is_replaced(router: RouterProcess, module: str, old: psutil.Process) -> None:
    await asyncio.to_thread(psutil.wait_procs, [old], 20)
    await until(lambda: any(p.pid != old.pid and p.is_running() for p in router.children(module)), "it is started again")


@pytest.mark.processes
@pytest.mark.rule("R30")
async def test_a_stopped_brain_under_load_is_replaced_and_costs_no_request(make_router: MakeRouter, tmp_path: Path) -> None:
    """Without the watch the edges chose by the safe rule for ever."""
    with cheap_workers(tmp_path, 2) as workers:
        router = await make_router("--workers", "2", "--hang-timeout", "2", "--static", ",".join(w.url for w in workers))
        await router.until_workers(2)
        statuses: list[int] = []
        stop = asyncio.Event()

        async def load(stream: bool) -> None:
            while not stop.is_set():
                answer = await router.chat(f"{len(statuses)}", stream=stream)
                statuses.append(answer.status_code if not stream or answer.content.endswith(b"data: [DONE]\n\n") else 0)

        loads = [asyncio.create_task(load(stream)) for stream in (False, True)]
        brain = router.child(BRAIN)
        assert brain is not None
        brain.suspend()
        await is_replaced(router, BRAIN, brain)

        async def decides() -> bool:
            return (await router.http.get(f"{router.control}/readyz")).json().get("status") == "ready"

        await until_async(decides, "a new brain decides")
        before = len(statuses)
        await until(lambda: len(statuses) > before + 20, "requests go on")
        stop.set()
        await asyncio.gather(*loads)
        assert set(statuses) == {200}
        await router.until_idle()
        assert "brain process has not reacted for" in router.log.read_text()


@pytest.mark.processes
@pytest.mark.parametrize("module", [EDGE, CONTROL])
async def test_a_stopped_edge_or_control_is_replaced(module: str, make_worker: MakeWorker, make_router: MakeRouter) -> None:
    router = await make_router("--static", (await make_worker()).url, "--hang-timeout", "1")
    await router.until_workers(1)
    old = router.child(module)
    assert old is not None
    old.suspend()
    await is_replaced(router, module, old)
    await until_async(router.is_ready, "ready again")
    await router.until_workers(1)
    assert (await router.chat()).status_code == 200


@pytest.mark.processes
async def test_a_loop_without_an_end_is_replaced_and_its_stack_is_in_the_log(
    make_worker: MakeWorker, make_router: MakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edge's first process gets an endless loop when a signal comes, its next one does not."""
    hook, once = tmp_path / "hook", tmp_path / "once"
    hook.mkdir()
    hook.joinpath("sitecustomize.py").write_text(
        "import os, signal\n"
        "def for_ever(*_):\n"
        f"    open({str(once)!r}, 'w').close()\n"
        "    while True:\n        pass\n"
        f"if not os.path.exists({str(once)!r}):\n    signal.signal(signal.SIGUSR1, for_ever)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")])))
    router = await make_router("--static", (await make_worker()).url, "--hang-timeout", "1")
    edge = router.child(EDGE)
    assert edge is not None
    edge.send_signal(signal.SIGUSR1)
    await is_replaced(router, EDGE, edge)
    await until_async(router.is_ready, "ready again")
    assert "for_ever" in router.log.read_text()


@pytest.mark.processes
async def test_with_0_nothing_is_killed_so_that_a_debugger_may_hold_it(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    router = await make_router("--static", (await make_worker()).url, "--hang-timeout", "0")
    old = router.child(CONTROL)
    assert old is not None
    old.suspend()
    await asyncio.sleep(3 * LOOK_S)
    assert old.is_running()
    old.resume()
    await until_async(router.is_ready, "ready again")
    assert router.child(CONTROL) == old


@pytest.mark.processes
async def test_a_busy_machine_is_no_hang(make_worker: MakeWorker, make_router: MakeRouter) -> None:
    """The router's processes have the least share of one CPU that others use up: they beat late, and none is killed."""
    router = await make_router("--static", (await make_worker()).url, "--hang-timeout", "0.3")
    await router.until_workers(1)
    children = psutil.Process(router.process.pid).children()
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    hogs = [await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", code]) for _ in range(6)]
    try:
        for child in children:
            child.cpu_affinity([cpu])
            os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
        for _ in range(10):
            assert (await router.chat()).status_code == 200
        await asyncio.sleep(3 * LOOK_S)
        assert all(c.is_running() for c in children) and "has not reacted" not in router.log.read_text()
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
