"""`up` that is killed with SIGKILL goes on when it is run again. A few places here; every step and many moments with --kill-everywhere."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_local.api import free_port
from fleet_local.cluster import LocalCluster
from fleet_local.components import COMPONENTS

pytestmark = pytest.mark.e2e

STEPS = ("binaries", "certificates", "cgroups", "namespaces", "configuration", "images", *COMPONENTS)
LATER_STEPS = ("node", "helm", "chart", "service", "available")  # of `make up`


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)


def up(state: Path) -> subprocess.Popen[str]:
    """`radixfleet local up` as a process whose lines can be followed."""
    ports = [] if LocalCluster(state).memory else ["--api-port", str(free_port()), "--router-port", str(free_port())]
    return _start("fleet_local.cli", "up", "--state", str(state), *ports)


def make_up(state: Path) -> subprocess.Popen[str]:
    """`make up` after its set-up: the cluster, the chart, the quickstart's service, one question."""
    return _start("fleet_local.quickstart", "--state", str(state))


def kill_after(state: Path, step: str, start: Callable[[Path], subprocess.Popen[str]] = up) -> None:
    """Starts `up` and kills it as soon as it has told that a step is done."""
    with start(state) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split()[:1] == [step]:
                process.send_signal(signal.SIGKILL)
                break
        else:
            pytest.fail(f"up ended without the step {step}")


def finish(state: Path) -> list[str]:
    """Runs `up` to its end and checks that the cluster is whole; returns what it told."""
    with up(state) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0, "\n".join(lines)
    cluster = LocalCluster(state, quiet=True)
    assert [p.name for p in cluster.status() if p.pid is None] == []
    assert cluster.node_ready()
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=30s")
    return lines


def works(state: Path) -> None:
    """A pod runs, and a second `up` has nothing left to do."""
    cluster = LocalCluster(state, quiet=True)
    spec = {"containers": [{"name": "a", "image": "localhost/radixfleet/local:dev", "command": ["sleep", "600"]}], "terminationGracePeriodSeconds": 0}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    cluster.kubectl("wait", "pod/p", "--for=condition=Ready", "--timeout=60s")
    told = finish(state)
    assert all("already there" in line for line in told[:-1]), "\n".join(told)


def test_up_goes_on_after_it_was_killed_at_some_steps(local_state: Path) -> None:
    for step in ("namespaces", "etcd", "apiserver"):
        kill_after(local_state, step)
    finish(local_state)
    works(local_state)


def answers(state: Path) -> list[str]:
    """Runs `make up` to its end, where it must have asked and been answered; returns the lines of its steps."""
    with make_up(state) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0 and any("chunks in" in line for line in lines), "\n".join(lines)
    return [line for line in lines[: lines.index("")] if line.split()[2:3] == ["s"]]


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [*STEPS, *LATER_STEPS])
def test_make_up_goes_on_after_it_was_killed_after_any_step(local_state: Path, step: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--kill-everywhere"):
        pytest.skip("a long test: make up-kill")
    kill_after(local_state, step, make_up)
    answers(local_state)
    told = answers(local_state)
    assert {line.split()[0] for line in told} >= {*STEPS, *LATER_STEPS}
    assert all(line.endswith("already there") for line in told), "\n".join(told)


@pytest.mark.model
@pytest.mark.timeout(1800)
def test_make_up_goes_on_after_it_was_killed_at_any_moment(local_state: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--kill-everywhere"):
        pytest.skip("a long test: make up-kill")
    chance = random.Random(21)
    for round_number in range(5):
        for _ in range(4):
            with make_up(local_state) as process:
                time.sleep(chance.uniform(1.0, 25.0))
                process.send_signal(signal.SIGKILL)
        try:
            answers(local_state)
            assert all(line.endswith("already there") for line in answers(local_state))
        except AssertionError as e:
            raise AssertionError(f"round {round_number}: {e}") from e
        LocalCluster(local_state, quiet=True).down()


@pytest.mark.timeout(900)
def test_up_goes_on_after_it_was_killed_at_any_moment(local_state: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--kill-everywhere"):
        pytest.skip("a long test: make up-kill")
    chance = random.Random(20)
    for round_number in range(20):
        for _ in range(3):
            with up(local_state) as process:
                time.sleep(chance.uniform(0.15, 4.0))
                process.send_signal(signal.SIGKILL)
        try:
            finish(local_state)
            works(local_state)
        except AssertionError as e:
            raise AssertionError(f"round {round_number}: {e}") from e
        LocalCluster(local_state, quiet=True).down()
