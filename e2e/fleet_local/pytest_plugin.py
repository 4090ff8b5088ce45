"""Clusters for tests: `cluster` (one a run), `namespace` (one a test), `private_cluster` (to hurt). Loaded by e2e/conftest.py.

`--kubeconfig PATH` takes a cluster that is there. RADIXFLEET_E2E_STATE=DIR keeps the run's cluster in DIR and takes it up again in the next run.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from fleet_local import facts, processes
from fleet_local.api import ClusterClient, ExistingCluster, free_port
from fleet_local.cluster import LocalCluster

STATES: Final = Path("/var/tmp/radixfleet-e2e")  # not /tmp: that is memory on some machines
ENV_STATE: Final = "RADIXFLEET_E2E_STATE"
_SKIPPED = pytest.StashKey[int]()
_REASON = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("radixfleet")
    group.addoption("--kubeconfig", type=Path, default=None, metavar="PATH", help="run the scenarios on this cluster instead of a local one")
    group.addoption(
        "--registry", default=None, metavar="PREFIX", help="take the images PREFIX/radixfleet-{operator,router,runtime} (with --kubeconfig)"
    )
    group.addoption("--tag", default="dev", metavar="TAG", help="the tag of those images; default dev")
    group.addoption("--kill-everywhere", action="store_true", help="the long tests that kill `up` after every step (make up-kill)")


def why_no_local_cluster() -> str | None:
    """One line when this user cannot start one here at all (not Linux, no root); None when they can. Other troubles are errors."""
    found = facts.problems(facts.gather(STATES))
    return found[0] if found and ("needs root" in found[0] or "needs Linux" in found[0]) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = why_no_local_cluster()
    if reason is None:
        return
    existing = config.getoption("--kubeconfig") is not None
    skipped = 0
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        needs_local = bool(names & {"private_cluster", "local_state"})
        if item.get_closest_marker("e2e") and (needs_local or not existing):
            item.add_marker(pytest.mark.skip(reason=reason))
            skipped += 1
    config.stash[_SKIPPED], config.stash[_REASON] = skipped, reason


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if skipped := config.stash.get(_SKIPPED, 0):
        terminalreporter.write_line(f"{skipped} cluster tests did not run: {config.stash[_REASON]}")


def sweep() -> None:
    """Removes the clusters of test runs that were killed: folders named by a process that is no more."""
    for folder in STATES.glob("*.*.*") if STATES.is_dir() else []:
        pid, ticks, _ = folder.name.split(".", 2)
        owner = processes.ProcessRecord(processes.boot_id(), "", int(pid), int(ticks))
        if not processes.is_alive(owner):
            LocalCluster(folder, quiet=True).down()


def new_state() -> Path:
    """A state folder that says whose it is."""
    pid, _, ticks = processes.parse_stat(Path("/proc/self/stat").read_text())
    return STATES / f"{pid}.{ticks}.{uuid.uuid4().hex[:6]}"


@contextmanager
def fresh_state() -> Iterator[Path]:
    """A state folder of its own; whatever cluster is left in it is removed at the end."""
    state = new_state()
    try:
        yield state
    finally:
        LocalCluster(state, quiet=True).down()
        if STATES.is_dir() and not any(STATES.iterdir()):
            STATES.rmdir()


def start(state: Path, *, quiet: bool = True) -> LocalCluster:
    """A started cluster on ports of its own, away from those of `make up`."""
    cluster = LocalCluster(state, quiet=quiet)
    if cluster.memory is None:
        cluster.up(api_port=free_port(), router_port=free_port())
    else:
        cluster.up()
    return cluster


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[ClusterClient]:
    """The run's cluster; tests keep to a namespace of their own and leave the node alone."""
    kubeconfig: Path | None = request.config.getoption("--kubeconfig")
    if kubeconfig is not None:
        yield ExistingCluster(kubeconfig)
        return
    sweep()
    if kept := os.environ.get(ENV_STATE):
        yield start(Path(kept))
        return
    with fresh_state() as state:
        yield start(state)


@pytest.fixture
def local_state() -> Iterator[Path]:
    """A state folder without a cluster; what a test starts there is removed."""
    sweep()
    with fresh_state() as state:
        yield state


@pytest.fixture
def private_cluster(local_state: Path) -> LocalCluster:
    """A started local cluster of the test's own, to be hurt."""
    return start(local_state)


@pytest.fixture
def namespace(cluster: ClusterClient, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one test, named after it."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())
    name = f"t-{words[:28].strip('-')}-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=30s")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
