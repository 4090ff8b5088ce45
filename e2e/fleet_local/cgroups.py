"""The cgroup of a cluster: one folder per hierarchy that holds every process of the cluster, pods and components.

Which files to touch is a pure function of facts (`choose_cgroups`), the same for hosts with cgroup v1, hybrid and v2.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_local.errors import ClusterError

CGROUP_MOUNT: Final = "/sys/fs/cgroup"
# What kubelet insists on (pkg/kubelet/cm of Kubernetes 1.36), and what pods' limits need.
NEEDED_V1: Final = ("cpu", "cpuacct", "cpuset", "memory", "pids")
NEEDED_V2: Final = ("cpu", "cpuset", "memory", "pids")
# What kubelet gives all pods of a node for each CPU, right below the root: cpu.shares of v1, and cpu.weight of v2 by its formula.
SHARES_PER_CPU: Final = 1024
WEIGHT_PER_CPU: Final = 39
LEAST_WEIGHT: Final = 100  # the kernel's default


@dataclass(frozen=True, slots=True)
class CgroupMount:
    """One mounted hierarchy: where, `cgroup` or `cgroup2`, its v1 controllers (`name=systemd` counts), and whether we may write."""

    path: str
    kind: str
    controllers: tuple[str, ...] = ()
    writable: bool = True


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """What the host offers. `v2_…` are of the v2 root: controllers there are, and those its children already get."""

    mounts: tuple[CgroupMount, ...]
    v2_controllers: tuple[str, ...] = ()
    v2_enabled: tuple[str, ...] = ()
    cpus: int = 1


@dataclass(frozen=True, slots=True)
class CgroupPlan:
    """Where the cluster's folders go.

    `folders`: one per hierarchy. `tracking`: the one that holds the component processes. `enable`: controllers to switch on in the v2 root.
    `copy_cpuset`: v1 folders whose cpuset must be filled before a process may enter. `root`: what kubelet calls cgroupRoot.
    `cpu`: a file and the share of the CPUs to write there. A folder counts no more than one process outside of it by default: beside a
    compiler all pods together would get less than a process of it, and their probes would fail.
    """

    version: int
    root: str
    folders: tuple[Path, ...]
    tracking: Path
    enable: tuple[str, ...] = ()
    copy_cpuset: tuple[Path, ...] = ()
    cpu: tuple[Path, int] | None = None


def choose_cgroups(facts: CgroupFacts, name: str) -> CgroupPlan | str:
    """Facts → plan, or one line that says why this host cannot run pods and what to do. Pure.

    As for runc and kubelet, the file system at /sys/fs/cgroup decides: cgroup2 there is v2, all else is v1, even with a cgroup2 below it (hybrid).
    """
    unified = next((m for m in facts.mounts if m.path == CGROUP_MOUNT and m.kind == "cgroup2"), None)
    if unified is not None:
        if not unified.writable:
            return f"{CGROUP_MOUNT} is read-only; in a container run it with --privileged"
        if missing := [c for c in NEEDED_V2 if c not in facts.v2_controllers]:
            return f"cgroup v2 has no controller {', '.join(missing)}; enable it on the kernel's command line (cgroup_enable=…) or for this container"
        folder = Path(CGROUP_MOUNT, name)
        enable = tuple(c for c in NEEDED_V2 if c not in facts.v2_enabled)
        weight = max(LEAST_WEIGHT, WEIGHT_PER_CPU * facts.cpus)
        return CgroupPlan(2, f"/{name}", (folder,), folder, enable=enable, cpu=(folder / "cpu.weight", weight))
    v1 = [m for m in facts.mounts if m.kind == "cgroup"]
    if not v1:
        return f"no cgroups are mounted at {CGROUP_MOUNT}; mount them (package cgroupfs-mount) or boot with systemd"
    owner = {c: m for m in v1 for c in m.controllers}
    if missing := [c for c in NEEDED_V1 if c not in owner]:
        return f"cgroup v1 has no controller {', '.join(missing)} mounted below {CGROUP_MOUNT}; mount it (package cgroupfs-mount)"
    if locked := sorted(m.path for m in v1 if not m.writable):
        return f"{locked[0]} is read-only; in a container run it with --privileged"
    folders = tuple(Path(m.path, name) for m in sorted(v1, key=lambda m: m.path))
    cpu = Path(owner["cpu"].path, name, "cpu.shares"), SHARES_PER_CPU * facts.cpus
    return CgroupPlan(1, f"/{name}", folders, Path(owner["pids"].path, name), copy_cpuset=(Path(owner["cpuset"].path, name),), cpu=cpu)


def parse_mounts(mountinfo: str) -> tuple[CgroupMount, ...]:
    """The cgroup hierarchies of a /proc/self/mountinfo text (proc(5)), each once."""
    found: dict[str, CgroupMount] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words, (kind, _, options) = left.split(), right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2") or not words[4].startswith(CGROUP_MOUNT):
            continue
        controllers = tuple(o for o in options.split(",") if o not in ("rw", "ro", "xattr", "clone_children")) if kind == "cgroup" else ()
        found[words[4]] = CgroupMount(words[4], kind, controllers, "rw" in words[5].split(","))
    return tuple(found.values())


def gather_cgroups() -> CgroupFacts:
    """Reads the host."""

    def words(name: str) -> tuple[str, ...]:
        try:
            return tuple(Path(CGROUP_MOUNT, name).read_text().split())
        except OSError:
            return ()

    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
    return CgroupFacts(mounts, words("cgroup.controllers"), words("cgroup.subtree_control"), len(os.sched_getaffinity(0)))


def have_cgroups(plan: CgroupPlan, components: Sequence[str]) -> bool:
    """True when all folders are there."""
    return all(f.is_dir() for f in plan.folders) and all(component_folder(plan, c).is_dir() for c in components)


def component_folder(plan: CgroupPlan, component: str) -> Path:
    """Where the process of one component lives. Below `system`, for in v2 a folder with children may hold no process."""
    return plan.tracking / "system" / component


def make_cgroups(plan: CgroupPlan, components: Sequence[str]) -> None:
    """Creates what is missing. Raises ClusterError when the host refuses (a container without its own cgroup namespace, for one)."""
    try:
        if plan.enable:
            Path(CGROUP_MOUNT, "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in plan.enable))
        for folder in plan.folders:
            folder.mkdir(exist_ok=True)
        for folder in plan.copy_cpuset:
            for name in ("cpuset.cpus", "cpuset.mems"):
                if not (folder / name).read_text().strip():
                    (folder / name).write_text((folder.parent / name).read_text())
        if plan.version == 2:
            (plan.tracking / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in NEEDED_V2))
        if plan.cpu is not None:
            file, share = plan.cpu
            file.write_text(str(share))
        for component in components:
            component_folder(plan, component).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ClusterError(f"cannot create the cgroup {plan.root}: {e}; in a container run it with --privileged and its own cgroup namespace") from e


def cluster_folders(mounts: Iterable[CgroupMount], name: str) -> list[Path]:
    """The folders of a cluster that exist, in whatever hierarchy (also those that the plan of another boot would not name)."""
    return [p for m in mounts if (p := Path(m.path, name)).is_dir()]


def remove_cgroups(folders: Iterable[Path], *, limit_s: float) -> None:
    """Removes folders whose processes have ended, deepest first; the kernel needs a moment to see the last exit."""
    limit = time.monotonic() + limit_s
    for top in folders:
        while top.is_dir():
            for path, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(path)
                except OSError:
                    continue
            if top.is_dir():
                if time.monotonic() > limit:
                    raise ClusterError(f"cannot remove the cgroup {top}; run `radixfleet local down` again")
                time.sleep(0.02)
