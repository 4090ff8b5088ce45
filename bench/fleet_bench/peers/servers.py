"""The servers that are compared: how each is started, stopped, frozen while another is measured, and what memory it holds.

Processes are known by the ids that we started and their children; nothing is ended by its name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleet_bench.peers import setup

MODEL: Final = "bench"  # the served name, the same everywhere
CONTEXT: Final = 4096
KV_BYTES: Final = 2 << 30
MAX_ROWS: Final = 64


class ServerFailed(Exception):
    """A server did not start or ended; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A server as it can be started. `argv` gets the data port and a second free port."""

    name: str
    argv: Callable[[int, int], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    takes_ids: bool = True  # prompts of token ids and ignore_eos
    fresh_caches: tuple[str, ...] = ()  # variables that name a cache folder; each start gets an empty one


def ours(name: str, model: str, flags: Sequence[str]) -> Kind:
    """Our worker, alone: no router in front, as the peers have none."""

    def argv(port: int, second: int) -> list[str]:
        fixed = ["--model", model, "--served-model-name", MODEL, "--host", "127.0.0.1", "--internal-host", "127.0.0.1", "--drain-timeout", "2"]
        ports = [
            "--data-port",
            str(port),
            "--internal-port",
            str(second),
            "--bootstrap-port",
            "0",
            "--transfer-port",
            "0",
            "--load-port",
            "0",
            "--events-port",
            "0",
            "--replay-port",
            "0",
        ]
        sizes = ["--context-length", str(CONTEXT), "--kv-cache-memory", str(KV_BYTES), "--max-rows", str(MAX_ROWS), "--log-level", "warning"]
        return [sys.executable, "-m", "fleet_runtime", *fixed, *ports, *sizes, *flags]

    return Kind(name, argv)


def vllm(name: str, python: Path, model: str, *, eager: bool, fresh: bool) -> Kind:
    """vLLM's CPU server in the configuration its documentation gives. `fresh`: each start compiles, as the first start in a new pod does."""

    def argv(port: int, second: int) -> list[str]:
        out = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", MODEL, "--host", "127.0.0.1"]
        out += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(MAX_ROWS)]
        out += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--no-enable-log-requests"]
        return [*out, "--enforce-eager"] if eager else out

    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    # Its documentation asks for both: https://docs.vllm.ai/en/latest/getting_started/installation/cpu
    if preload := [str(p) for p in (*map(Path, TCMALLOC), python.parent.parent / "lib" / "libiomp5.so") if p.exists()]:
        environment["LD_PRELOAD"] = ":".join(preload)
    return Kind(name, argv, environment, fresh_caches=("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR") if fresh else ())


TCMALLOC: Final = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4")


def llama(name: str, python: Path, gguf: Path) -> Kind:
    """llama.cpp's weights and kernels behind llama-cpp-python's server: one request at a time, 4-bit weights."""

    def argv(port: int, second: int) -> list[str]:
        threads = str(len(os.sched_getaffinity(0)))
        out = [str(python), "-m", "llama_cpp.server", "--model", str(gguf), "--model_alias", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        return [*out, "--n_ctx", str(CONTEXT), "--n_threads", threads, "--n_threads_batch", threads, "--verbose", "false"]

    return Kind(name, argv, takes_ids=False)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


class Server:
    """One started server. `stop` ends every process of it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.port, self.second_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = Path(tempfile.mkdtemp(prefix=f"radixfleet-bench-{kind.name}-"))
        self.log = self._folder / "log"
        caches = {name: str(self._folder / name.lower()) for name in kind.fresh_caches}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | dict(kind.environment) | caches
        self.started_s = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                kind.argv(self.port, self.second_port), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self._known: set[int] = {self.process.pid}

    def check(self) -> None:
        """Raises ServerFailed when it has ended."""
        if (code := self.process.poll()) is not None:
            tail = "\n".join("    " + line for line in self.log.read_text(errors="replace").splitlines()[-12:])
            raise ServerFailed(f"{self.kind.name} ended with code {code}; the end of its log:\n{tail}")

    def pids(self) -> list[int]:
        """Its processes that live: those we started and their children, also children whose parent has died."""
        parents = _parents()
        found = {pid for pid in self._known if pid in parents}
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in found and pid not in found}
            found |= more
            grown = bool(more)
        self._known |= found
        return sorted(found)

    def freeze(self) -> None:
        """Stops all its processes, parents first, so that none is restarted by another."""
        for pid in self.pids():
            _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets them run again, children first: a parent that looks at its children finds them alive."""
        for pid in reversed(self.pids()):
            _signal(pid, signal.SIGCONT)

    def memory_bytes(self) -> int:
        """Proportional set size of all its processes: shared pages are counted once among those that share them."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        return total

    def stop(self, *, timeout_s: float = 15.0) -> None:
        """SIGTERM, then SIGKILL to what is left. Blocks until none of its processes lives; removes its folder."""
        self.thaw()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        while left := [pid for pid in self.pids() if pid != self.process.pid or self.process.poll() is None]:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)  # a killed process of another parent is gone when that one has reaped it
        shutil.rmtree(self._folder, ignore_errors=True)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _parents() -> dict[int, int]:
    """Parent of every process but zombies."""
    out: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state ppid …; a name may hold spaces and parentheses.
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    out[int(entry.name)] = int(parent)
    return out


def vllm_kinds(model: str, python: Path) -> dict[str, Kind]:
    """The ways vLLM is measured."""
    return {
        "vllm": vllm("vllm", python, model, eager=False, fresh=False),
        "vllm-eager": vllm("vllm-eager", python, model, eager=True, fresh=False),
        "vllm-first": vllm("vllm-first", python, model, eager=False, fresh=True),
    }


def ensure_kinds(
    wanted: Sequence[str], *, ours_model: str, model_folder: str, ours_flags: Sequence[str], say: Callable[[str], None]
) -> tuple[dict[str, Kind], dict[str, str]]:
    """Kinds by name, and for those that cannot be had here the reason."""
    kinds = {"ours": ours("ours", ours_model, ours_flags)}
    missing: dict[str, str] = {}
    if any(name.startswith("vllm") for name in wanted):
        try:
            kinds |= vllm_kinds(model_folder, setup.ensure(setup.VLLM, say))
        except setup.CannotSetUp as e:
            missing |= {name: str(e) for name in ("vllm", "vllm-eager", "vllm-first")}
    if "llama" in wanted:
        try:
            python = setup.ensure(setup.LLAMA, say)
            kinds["llama"] = llama("llama", python, setup.ensure_gguf(python, say))
        except setup.CannotSetUp as e:
            missing["llama"] = str(e)
    return kinds, missing
