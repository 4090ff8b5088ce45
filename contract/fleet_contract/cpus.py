"""How many CPUs a process may use: its affinity and the quota of its cgroup. Pure functions of facts, and who reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

ReadText = Callable[[str], str | None]  # path -> content, None when there is no such file


def read_text(path: str) -> str | None:
    """Content of a small file of the kernel or the kubelet; None when it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def cpu_quota(self_cgroup: str, read: ReadText) -> float | None:
    """CPUs that the cgroup of a process may use, the tightest of all levels; None without a limit.

    Args: self_cgroup: content of /proc/self/cgroup. Source: kernel docs, admin-guide/cgroup-v2 `cpu.max`, cgroup-v1 `cpu.cfs_quota_us`.
    A container sees its own cgroup at the root of the mount, the path of /proc/self/cgroup may be the host's: both are tried.
    """
    quotas: list[float] = []
    for line in self_cgroup.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            quotas += [q for d in _ancestors("/sys/fs/cgroup", path) if (q := _quota_v2(read(f"{d}/cpu.max"))) is not None]
        elif "cpu" in controllers.split(","):
            for mount in (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu"):
                for d in _ancestors(mount, path):
                    quota = _quota_v1(read(f"{d}/cpu.cfs_quota_us"), read(f"{d}/cpu.cfs_period_us"))
                    quotas += [] if quota is None else [quota]
    return min(quotas, default=None)


def _ancestors(mount: str, path: str) -> list[str]:
    steps = [s for s in path.split("/") if s not in ("", "..")]
    return [mount + "".join(f"/{s}" for s in steps[:n]) for n in range(len(steps) + 1)]


def _quota_v2(text: str | None) -> float | None:
    """`max 100000` or `150000 100000`."""
    words = (text or "").split()
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(quota: str | None, period: str | None) -> float | None:
    """Quota -1: none."""
    q, p = (quota or "").strip(), (period or "").strip()
    if not (q.isdigit() and p.isdigit()) or int(p) == 0:
        return None
    return int(q) / int(p)


def choose_threads(asked: int, affinity: int, quota: float | None) -> int:
    """Compute threads: what was asked, else whole CPUs of affinity and quota. More threads than quota wait for each other at every barrier."""
    if asked > 0:
        return asked
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def find_threads(asked: int) -> int:
    """`choose_threads` from this machine's facts."""
    quota = cpu_quota(read_text("/proc/self/cgroup") or "", read_text)
    return choose_threads(asked, len(os.sched_getaffinity(0)), quota)
