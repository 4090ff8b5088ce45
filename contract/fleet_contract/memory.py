"""How much memory this process may use: the machine's, or its cgroup's limit, v1 or v2."""

from __future__ import annotations

from pathlib import Path


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The least of the machine's memory and the limits of this process's cgroups; None where neither can be read.

    Args: root: where proc and sys are (tests).
    """
    limits = [_mem_total(root / "proc/meminfo")]
    for place, file in _cgroup_places(root):
        limits += [_limit(folder / file) for folder in (place, *place.parents) if folder.is_relative_to(root / "sys/fs/cgroup")]
    known = [n for n in limits if n is not None]
    return min(known, default=None)


def _cgroup_places(root: Path) -> list[tuple[Path, str]]:
    """Folders that may hold our limit, and its file. In a container /proc may show the host's path while /sys shows ours at the top."""
    places = [(root / "sys/fs/cgroup", "memory.max"), (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes")]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return places
    for line in lines:  # hierarchy:controllers:path
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places.append((root / "sys/fs/cgroup" / path.lstrip("/"), "memory.max"))
        elif "memory" in controllers.split(","):
            places.append((root / "sys/fs/cgroup/memory" / path.lstrip("/"), "memory.limit_in_bytes"))
    return places


def _limit(file: Path) -> int | None:
    """None for no file, "max", and v1's huge number for no limit (it is above any machine's memory, so min() drops it as well)."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _mem_total(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
