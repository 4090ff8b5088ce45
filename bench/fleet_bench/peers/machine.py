"""The machine in words, for a results file; no name of the host."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> dict[str, object]:
    """Processor, cores, memory, kernel and what the processor can do for us."""
    cpu = _proc_lines("/proc/cpuinfo")
    memory_kib = int(_proc_lines("/proc/meminfo").get("MemTotal", "0 kB").split()[0])
    flags = set(cpu.get("flags", "").split())
    return {
        "processor": cpu.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "instructions": [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if f in flags],
        "virtual": "hypervisor" in flags,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def words(machine: dict[str, object]) -> str:
    """One line."""
    virtual = ", virtual" if machine["virtual"] else ""
    return f"{machine['processor']}, {machine['cores']} cores{virtual}, {machine['memory_gib']} GiB"


def _proc_lines(path: str) -> dict[str, str]:
    """`key : value` lines of a file of /proc; the first of each key."""
    out: dict[str, str] = {}
    for line in Path(path).read_text().splitlines():
        key, colon, value = line.partition(":")
        if colon:
            out.setdefault(key.strip(), value.strip())
    return out
