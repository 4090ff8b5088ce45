"""`make up` as a whole, on a state of its own: run twice, then removed. And the chart after a helm that was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleet_contract.names import SYSTEM_NAMESPACE
from fleet_local import binaries
from fleet_local.cluster import LocalCluster
from fleet_local.install import RELEASE, checkout, install_chart, local_values
from fleet_testing.fleet import wait_for
from fleet_testing.host_traces import Traces, host_network, namespace_inodes, traces

pytestmark = pytest.mark.e2e

# What changes by itself on a cluster at rest: heartbeats and what tells of them.
RESTLESS = {"Lease", "Node", "Event"}


def make_up(state: Path) -> list[str]:
    """`make up` after its set-up; the lines that it told."""
    command = [sys.executable, "-m", "fleet_local.quickstart", "--state", str(state)]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=800)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def steps(told: list[str]) -> dict[str, str]:
    """Step → what it did: the lines up to the question."""
    rows = [line.split(maxsplit=3) for line in told[: told.index("")]]
    return {row[0]: row[3] for row in rows if len(row) == 4 and row[2] == "s"}


def versions(cluster: LocalCluster) -> dict[str, str]:
    """resourceVersion of every object there is."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split()
    wanted = ",".join(k for k in kinds if not k.startswith("events") and not k.endswith(".metrics.k8s.io"))
    found: list[dict[str, Any]] = cluster.get(wanted, "-A")["items"]
    return {
        f"{o['kind']} {o['metadata'].get('namespace', '')}/{o['metadata']['name']}": o["metadata"].get("resourceVersion", "")
        for o in found
        if o["kind"] not in RESTLESS
    }


@pytest.mark.model
@pytest.mark.timeout(900)
def test_make_up_run_twice_changes_nothing_and_down_leaves_nothing(local_state: Path) -> None:
    network = host_network()
    told = make_up(local_state)
    assert {"etcd", "node", "helm", "chart", "service", "available"} <= set(steps(told))
    assert steps(told)["chart"] == "installed" and "created" in steps(told)["service"]
    cluster = LocalCluster(local_state, quiet=True)

    def at_rest() -> dict[str, str] | None:
        before = versions(cluster)
        time.sleep(1)
        return before if versions(cluster) == before else None

    before, pids = wait_for(at_rest, within_s=60, what="a cluster at rest"), {p.name: p.pid for p in cluster.status()}
    started = time.monotonic()
    again = make_up(local_state)
    print(f"the second run took {time.monotonic() - started:.1f} s")
    assert set(steps(again)) == set(steps(told))
    assert {name: what for name, what in steps(again).items() if what != "already there"} == {}
    assert versions(cluster) == before
    assert {p.name: p.pid for p in cluster.status()} == pids
    assert any("chunks in" in line for line in again), "the second run asks too"
    pods = cluster.get("pods", "-A")["items"]
    assert {c["restartCount"] for p in pods for c in p["status"]["containerStatuses"]} == {0}
    marks = {p["metadata"]["uid"] for p in pods} | {cluster.layout.id, str(local_state)}
    worker = next(p["metadata"]["name"] for p in pods if p["metadata"]["namespace"] == "default")
    inodes = namespace_inodes(cluster, worker)
    assert traces(cluster, inodes, marks).processes, "the search finds nothing even while the cluster runs"
    ending_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    result = subprocess.run([sys.executable, "-m", "fleet_local.cli", "down", "--state", str(local_state)], capture_output=True, text=True)
    assert result.returncode == 0 and "cluster removed" in result.stdout, result.stdout + result.stderr
    assert traces(cluster, inodes, marks, born_before_s=ending_s) == Traces([], [], [], [])
    assert not local_state.exists()
    assert host_network() == network


def test_a_chart_whose_helm_was_killed_is_installed_by_the_next_run(private_cluster: LocalCluster) -> None:
    cluster = private_cluster

    def release() -> str:
        result = cluster.helm("status", RELEASE, "-n", SYSTEM_NAMESPACE, "-o", "json", check=False)
        return str(json.loads(result.stdout)["info"]["status"]) if result.returncode == 0 else ""

    def kill_helm_when(status: str, *more: str) -> None:
        settings = [word for key, value in local_values().items() for word in ("--set", f"{key}={value}")]
        where = ["-n", SYSTEM_NAMESPACE, "--create-namespace", "--wait"]
        command = [str(binaries.ensure("helm")), "upgrade", "--install", RELEASE, str(checkout() / "charts" / "radixfleet"), *where, *settings, *more]
        with subprocess.Popen(command, env=cluster.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as helm:
            wait_for(lambda: release() == status, within_s=30, what=f"a release that is {status}")
            helm.send_signal(signal.SIGKILL)

    kill_helm_when("pending-install")
    assert release() == "pending-install"
    assert install_chart(cluster, checkout(), local_values())
    assert release() == "deployed" and not install_chart(cluster, checkout(), local_values())
    kill_helm_when("pending-upgrade", "--set", "operator.logLevel=debug")
    assert install_chart(cluster, checkout(), local_values())
    assert release() == "deployed" and not install_chart(cluster, checkout(), local_values())
