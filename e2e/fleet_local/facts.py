"""What the machine is like, and what of it keeps a cluster from starting: facts are read here, judged in the pure function `problems`."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_local.cgroups import CgroupFacts, choose_cgroups, gather_cgroups
from fleet_local.components import CNI_PLUGINS

MIN_DISK_BYTES: Final = 2 * 2**30
SBIN: Final = "/usr/local/sbin:/usr/sbin:/sbin"  # not in the PATH of every root shell
# program or file -> Debian package
TOOLS: Final = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    f"{CNI_PLUGINS}/bridge": "containernetworking-plugins",
    f"{CNI_PLUGINS}/portmap": "containernetworking-plugins",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
}
OTHER_WAYS: Final = "`radixfleet serve MODEL` needs no root and no Kubernetes, and tests take any cluster with --kubeconfig PATH"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The machine, as far as a cluster cares. `missing_tools` are keys of TOOLS."""

    platform: str
    uid: int
    missing_tools: tuple[str, ...]
    state: str
    disk_free_bytes: int
    cgroups: CgroupFacts


def search_path() -> str:
    """PATH with the sbin folders."""
    return f"{os.environ.get('PATH', '/usr/local/bin:/usr/bin:/bin')}:{SBIN}"


def gather(state: Path) -> HostFacts:
    """Reads the machine; works on any platform and as any user."""
    linux = sys.platform == "linux"
    path = search_path()
    missing = tuple(t for t in TOOLS if not (os.path.exists(t) if t.startswith("/") else shutil.which(t, path=path)))
    there = next(p for p in (state, *state.parents) if p.exists())
    free = shutil.disk_usage(there).free
    return HostFacts(sys.platform, os.geteuid(), missing, str(state), free, gather_cgroups() if linux else CgroupFacts(()))


def problems(facts: HostFacts) -> list[str]:
    """One line for each thing that keeps a cluster from starting, with what to do; empty when all is well. Pure."""
    if facts.platform != "linux":
        return [f"the local cluster needs Linux (this is {facts.platform}): start it in a Linux VM; {OTHER_WAYS}"]
    if facts.uid != 0:
        return [f"the local cluster needs root (this is uid {facts.uid}): run it with sudo; {OTHER_WAYS}"]
    found: list[str] = []
    if packages := sorted({TOOLS[t] for t in facts.missing_tools}):
        names = " ".join(packages)
        found.append(f"missing Debian packages: {names}; install them with `apt-get install -y {names}` (or `make setup`)")
    if facts.disk_free_bytes < MIN_DISK_BYTES:
        have, need = facts.disk_free_bytes / 2**30, MIN_DISK_BYTES / 2**30
        found.append(
            f"no disk space: {have:.1f} GiB free at {facts.state}, {need:.0f} GiB are needed; free some, or choose another disk with --state DIR"
        )
    plan = choose_cgroups(facts.cgroups, "radixfleet")
    if isinstance(plan, str):
        found.append(plan)
    return found


def snapshotter(mountinfo: str, folder: Path) -> str:
    """containerd's snapshotter for a disk: overlayfs, but `native` (plain copies) where the folder is itself on an overlay. Pure."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return "native" if kind in ("overlay", "fuse-overlayfs") else "overlayfs"


def port_is_free(port: int) -> bool:
    """True when a server could listen on it on loopback now."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def choose_port(*, asked: int | None, remembered: int | None, default: int, ours: bool, free: Sequence[int], spare: int) -> int | str:
    """Which port of loopback to publish on, or one line that says why not. Pure.

    Args:
        asked: by a flag; never replaced silently.
        remembered: of the earlier start of this cluster; `ours` says that our own forwarder still holds it.
        free: those of the named ports that nobody holds.
        spare: a free port of the system's choice.
    """
    if remembered is not None and (asked is None or asked == remembered) and (ours or remembered in free):
        return remembered
    taken = asked if asked is not None else remembered
    if asked is not None and asked in free:
        return asked
    if taken is None:
        return default if default in free else spare
    before = ", which this cluster used before," if asked is None else ""
    return f"port {taken} of 127.0.0.1{before} is taken; end what listens there (`ss -ltnp 'sport = :{taken}'`) or choose another port"
