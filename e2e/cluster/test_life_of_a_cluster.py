"""Starting twice, repairing, side by side, and leaving nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_local.cluster import LocalCluster
from fleet_local.components import API_CLIENTS, COMPONENTS
from fleet_local.errors import ClusterError
from fleet_local.namespaces import mount_points
from fleet_local.pytest_plugin import fresh_state, start
from fleet_testing.host_traces import Traces, host_network, namespace_inodes, traces

pytestmark = pytest.mark.e2e

POD = """
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: web
    image: localhost/radixfleet/local:dev
    command: [python, -m, http.server, "8000"]
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, emptyDir: {medium: Memory}}]
"""


def run_pod(cluster: LocalCluster, *, timeout_s: int = 60) -> str:
    """A new Ready pod with an address; returns its uid."""
    cluster.kubectl("delete", "pod", "web", "--ignore-not-found", "--timeout=30s")
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=30s")
    cluster.apply(POD)
    cluster.kubectl("wait", "pod/web", "--for=condition=Ready", f"--timeout={timeout_s}s")
    return str(cluster.get("pod", "web")["metadata"]["uid"])


def pids(cluster: LocalCluster) -> dict[str, int | None]:
    return {part.name: part.pid for part in cluster.status()}


def files(folder: Path) -> dict[str, float]:
    return {str(p): p.lstat().st_mtime for p in folder.rglob("*")}


@pytest.fixture(scope="module")
def tough_cluster() -> Iterator[LocalCluster]:
    """A cluster that tests of this file hurt and repair one after the other: starting a new one for each takes too long."""
    with fresh_state() as state:
        yield start(state)


def test_a_second_up_changes_nothing(tough_cluster: LocalCluster) -> None:
    cluster = tough_cluster
    uid = run_pod(cluster)
    before, written = pids(cluster), {**files(cluster.layout.config), **files(cluster.layout.pki), **files(cluster.layout.run)}
    told: list[str] = []
    LocalCluster(cluster.layout.state, say=told.append).up()
    assert pids(cluster) == before and None not in before.values()
    assert {**files(cluster.layout.config), **files(cluster.layout.pki), **files(cluster.layout.run)} == written
    assert told and all(line.endswith("already there") for line in told), told
    assert cluster.get("pod", "web")["metadata"]["uid"] == uid
    assert cluster.get("pod", "web")["status"]["containerStatuses"][0]["restartCount"] == 0


@pytest.mark.parametrize("victims", [("kubelet",), ("containerd",), ("apiserver", "etcd"), ("forward-api", "proxy", "coredns"), COMPONENTS])
def test_a_half_dead_cluster_is_repaired_and_its_pods_live_on(tough_cluster: LocalCluster, victims: tuple[str, ...]) -> None:
    cluster = tough_cluster
    cluster.up()  # whatever the test before has left
    uid = run_pod(cluster)
    before = pids(cluster)
    for name in victims:
        pid = before[name]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    limit = time.monotonic() + 10
    while {p.name for p in cluster.status() if p.pid is None} != set(victims):
        assert time.monotonic() < limit
        time.sleep(0.05)
    cluster.up()
    after = pids(cluster)
    also = set(API_CLIENTS) if "apiserver" in victims else set()
    assert {n for n in after if after[n] != before[n]} == set(victims) | also
    pod = cluster.get("pod", "web")
    assert pod["metadata"]["uid"] == uid and pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert "Directory listing" in cluster.pod_get("default", "web", 8000, "/")
    cluster.kubectl("delete", "pod", "web", "--timeout=30s")
    run_pod(cluster)


def test_lost_namespaces_are_made_anew_and_the_objects_stay(tough_cluster: LocalCluster) -> None:
    cluster = tough_cluster
    uid = run_pod(cluster)
    cluster.layout.namespaces.remove()  # as after a reboot: mounts gone, state on disk
    cluster.up()
    cluster.kubectl("wait", "pod/web", "--for=condition=Ready", "--timeout=90s")
    assert cluster.get("pod", "web")["metadata"]["uid"] == uid
    limit = time.monotonic() + 60
    while True:
        try:
            assert "Directory listing" in cluster.pod_get("default", "web", 8000, "/")
            break
        except ClusterError:
            assert time.monotonic() < limit
            time.sleep(0.2)


def test_two_clusters_live_side_by_side_and_one_ends_without_the_other(tough_cluster: LocalCluster) -> None:
    first = tough_cluster
    uid = run_pod(first)
    with fresh_state() as state:
        second = start(state)
        run_pod(second)
        assert first.kubeconfig.read_text() != second.kubeconfig.read_text()
        assert first.get("namespace", "kube-system")["metadata"]["uid"] != second.get("namespace", "kube-system")["metadata"]["uid"]
        assert second.down()
    pod = first.get("pod", "web")
    assert pod["metadata"]["uid"] == uid and pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert None not in pids(first).values()
    assert "Directory listing" in first.pod_get("default", "web", 8000, "/")


def test_the_same_tests_run_on_another_cluster_by_its_kubeconfig(tough_cluster: LocalCluster) -> None:
    tests, before = Path(__file__).with_name("test_cluster_works.py"), namespaces_made(tough_cluster)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "--kubeconfig", str(tough_cluster.kubeconfig)]
    chosen = ["-k", "node_is_ready or restricted_pod or port_forward"]
    result = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 3 passed" in f" {result.stdout.splitlines()[-1]}"
    assert namespaces_made(tough_cluster) - before == 2, "the tests ran on another cluster"


def namespaces_made(cluster: LocalCluster) -> float:
    """How many namespaces clients have created since the API server started."""
    metrics = cluster.kubectl("get", "--raw", "/metrics").stdout.splitlines()
    wanted = [line for line in metrics if line.startswith("apiserver_request_total{") and 'resource="namespaces"' in line]
    return sum(float(line.split()[-1]) for line in wanted if 'verb="POST"' in line and 'code="201"' in line)


def test_a_port_that_is_taken_is_told_in_one_line(local_state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "fleet_local.cli", "up", "--state", str(local_state), "--router-port", str(port)],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip
    assert result.returncode == 1 and f"port {port} of 127.0.0.1 is taken" in result.stderr and result.stderr.count("\n") == 1
    assert not LocalCluster(local_state).layout.run.exists()


def test_the_router_endpoint_answers_503_until_a_router_is_there(tough_cluster: LocalCluster) -> None:
    memory = tough_cluster.memory
    assert memory is not None
    with socket.create_connection(("127.0.0.1", memory.router_port), timeout=10) as s:
        s.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert s.recv(64).startswith(b"HTTP/1.1 503 ")


# ---- down ----


@pytest.fixture
def marked(local_state: Path) -> tuple[LocalCluster, set[str], set[str]]:
    """A started cluster with a pod, its namespaces' inodes, and the ids of its objects."""
    cluster = start(local_state)
    uid = run_pod(cluster)
    status = cluster.get("pod", "web")["status"]["containerStatuses"][0]
    marks = {uid, status["containerID"].removeprefix("containerd://"), cluster.layout.id, str(local_state)}
    return cluster, namespace_inodes(cluster, "web"), marks


def test_down_leaves_nothing_but_the_cache(marked: tuple[LocalCluster, set[str], set[str]]) -> None:
    cluster, inodes, marks = marked
    during = traces(cluster, inodes, marks)
    assert len(during.processes) > len(COMPONENTS) and during.mounts and during.cgroups, "the search finds nothing even while the cluster runs"
    started, ending_s = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    assert cluster.down()
    assert traces(cluster, inodes, marks, born_before_s=ending_s) == Traces([], [], [], [])
    assert not cluster.layout.state.exists()
    assert not cluster.down(), "a second down finds something"
    print(f"down took {time.monotonic() - started:.1f} s")


def test_the_hosts_network_and_mounts_are_as_before_while_it_runs_and_after(local_state: Path) -> None:
    before, mounts = host_network(), set(mount_points(Path("/proc/self/mountinfo").read_text()))
    cluster = start(local_state)
    run_pod(cluster)
    assert host_network() == before
    new = {m for m in mount_points(Path("/proc/self/mountinfo").read_text()) if m not in mounts and str(local_state) in m}
    assert new == {str(local_state / "ns"), str(local_state / "ns" / "net"), str(local_state / "ns" / "mnt")}
    cluster.down()
    assert host_network() == before


@pytest.mark.parametrize("damage", ["damaged memory", "lost records", "everything killed, memory lost"])
def test_down_also_removes_what_is_half_dead_or_damaged(marked: tuple[LocalCluster, set[str], set[str]], damage: str) -> None:
    cluster, inodes, marks = marked
    layout = cluster.layout
    if damage == "damaged memory":
        layout.memory_file.write_text("{")
    elif damage == "lost records":
        for record in layout.run.iterdir():
            record.unlink()
    else:
        for pid in pids(cluster).values():
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        layout.memory_file.unlink()
    ending_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert LocalCluster(layout.state, quiet=True).down()
    assert traces(cluster, inodes, marks, born_before_s=ending_s) == Traces([], [], [], [])
    assert not layout.state.exists()
