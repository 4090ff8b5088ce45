"""What a local cluster has on the host: processes, mounts, cgroups, files, rules. For tests that nothing of it is left."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fleet_local import processes
from fleet_local.cluster import LocalCluster
from fleet_local.namespaces import mount_points


@dataclass(frozen=True)
class Traces:
    """All that a cluster has on the host and that names it; nothing of this may be left."""

    processes: list[str]
    mounts: list[str]
    cgroups: list[str]
    paths: list[str]


# Where Kubernetes, containerd, runc and CNI write when nobody stops them.
PLACES = (
    "/run",
    "/var/lib/kubelet",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/log/pods",
    "/var/log/containers",
    "/etc/cni",
    "/opt/containerd",
    "/tmp",
)


def traces(cluster: LocalCluster, inodes: set[str], marks: set[str], *, born_before_s: float = math.inf) -> Traces:
    """Looks for a cluster's state path, namespaces (by inode) and objects (by uid or id in a path).

    Args: born_before_s: CLOCK_BOOTTIME; younger processes are not looked at, since the kernel gives the inode of a namespace that is gone
    to the next one, which may be another cluster's.
    """
    state, ours = str(cluster.layout.state), []
    ticks_limit = born_before_s * os.sysconf("SC_CLK_TCK")
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            namespaces = {os.readlink(proc / "ns" / kind) for kind in ("net", "mnt")}
            words = (proc / "cmdline").read_bytes().decode(errors="replace")
            group = (proc / "cgroup").read_text()
            born_ticks = processes.parse_stat((proc / "stat").read_text())[2]
        except OSError:
            continue
        if born_ticks > ticks_limit:
            continue
        if int(proc.name) != os.getpid() and (namespaces & inodes or state in words or cluster.layout.cgroup in group):
            ours.append(f"{proc.name} {words[:80]}")
    mountinfo = Path("/proc/self/mountinfo").read_text()
    mounts = [m for m in mount_points(mountinfo) if m.startswith(f"{state}/")] + [i for i in inodes if f" {i} " in mountinfo]
    cgroups = [os.path.join(path, name) for path, names, _ in os.walk("/sys/fs/cgroup") for name in names if name == cluster.layout.cgroup]
    found = [line for place in PLACES for line in find(place) if any(m in line for m in marks)]
    return Traces(ours, mounts, cgroups, found)


def namespace_inodes(cluster: LocalCluster, pod: str, namespace: str = "default") -> set[str]:
    """Inodes of the network and mount namespaces of the cluster, and of a pod's network."""
    record = processes.read_record(cluster.layout.run / "kubelet")
    assert record is not None
    outer = {os.readlink(f"/proc/{record.pid}/ns/{kind}") for kind in ("net", "mnt")}
    return outer | {cluster.kubectl("exec", "-n", namespace, pod, "--", "readlink", "/proc/self/ns/net").stdout.strip()}


def find(place: str) -> list[str]:
    return subprocess.run(["find", place, "-xdev"], capture_output=True, text=True).stdout.splitlines()


def host_network() -> dict[str, str]:
    """The host's own rules, routes and links; counters and ages left out."""
    commands = {"iptables": ["iptables-save"], "routes": ["ip", "route", "show", "table", "all"], "links": ["ip", "-br", "link"]}
    out = {n: subprocess.run(c, capture_output=True, text=True).stdout for n, c in commands.items()}
    out["iptables"] = "\n".join(line.split(" [")[0] for line in out["iptables"].splitlines() if not line.startswith("#"))
    return out
