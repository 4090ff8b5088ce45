"""How much memory this process may use (the machine's, or its cgroup's limit, v1 or v2), and what fits. Called before a model is loaded."""

from __future__ import annotations

from pathlib import Path

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.errors import StartError
from fleet_runtime.models.spec import ModelSpec


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


def pages_in(memory_bytes: int, page_bytes: int, context_length: int) -> int:
    """How many pages fit. Raises StartError(OutOfMemory) when they hold less than one full context."""
    count, least = memory_bytes // page_bytes, -(-context_length // PAGE_SIZE)
    if count < least:
        raise StartError(
            "OutOfMemory",
            f"--kv-cache-memory is {memory_bytes} bytes and holds {count * PAGE_SIZE} tokens, one context of {context_length} tokens "
            f"(--context-length) needs {least * page_bytes} bytes; raise the first or lower the second",
        )
    return count


def step_bytes(spec: ModelSpec, *, step_tokens: int, rows: int, context: int, itemsize: int) -> int:
    """What the arrays of the largest step surely take: one layer's activations of a full chunk, the logits of all rows, and the keys, values and
    mask of one whole context. Args: itemsize: bytes of a number."""
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    activations = step_tokens * (2 * spec.hidden_size + heads + 2 * spec.intermediate_size)
    attention = context * 2 * spec.kv_heads * spec.head_dim + min(step_tokens, context) * context
    return itemsize * (activations + attention) + 4 * rows * spec.vocab_size


def check_memory(weights_bytes: int, kv_bytes: int, limit: int | None, *, step: int = 0) -> None:
    """Refuses what can never fit, before the kernel kills us for it. Args: step: of `step_bytes`. Raises StartError(OutOfMemory)."""
    if limit is not None and weights_bytes + kv_bytes + step > limit:
        scratch = f" and {step >> 20} MiB for a step (--max-step-tokens, --max-rows, --context-length)" if step else ""
        raise StartError(
            "OutOfMemory",
            f"weights of {weights_bytes >> 20} MiB, a KV cache of {kv_bytes >> 20} MiB (--kv-cache-memory){scratch} need more than the "
            f"{limit >> 20} MiB that this process may use; lower --kv-cache-memory or raise the memory limit",
        )
