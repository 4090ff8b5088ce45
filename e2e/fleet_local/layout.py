"""Where a cluster keeps its things, and what it remembers between runs (`cluster.json`)."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fleet_contract.cache_folder import cache_folder
from fleet_local.errors import ClusterError
from fleet_local.namespaces import COVERED, Namespaces

SCHEMA: Final = 1
DEFAULT_API_PORT: Final = 16443
DEFAULT_ROUTER_PORT: Final = 8080


def default_state() -> Path:
    """The state folder of the cluster that `make up` starts."""
    return cache_folder() / "cluster"


@dataclass(frozen=True, slots=True)
class Memory:
    """What `cluster.json` holds: the ports of the host that were chosen once, so that a URL stays the same."""

    api_port: int
    router_port: int
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths and names of one cluster; all follow from its state folder."""

    state: Path

    @classmethod
    def of(cls, state: Path) -> Layout:
        """Raises ClusterError when a cluster cannot live there."""
        resolved = state.expanduser().resolve()
        if resolved in (Path("/"), Path.home(), cache_folder()) or resolved.is_relative_to("/run") or str(resolved) in COVERED:
            raise ClusterError(f"--state {resolved}: must be a folder of its own on disk; try --state {default_state()}")
        return cls(resolved)

    @property
    def id(self) -> str:
        """8 hex digits that no other cluster of this machine has."""
        return hashlib.sha256(os.fsencode(self.state)).hexdigest()[:8]

    @property
    def cgroup(self) -> str:
        return f"radixfleet-{self.id}"

    @property
    def memory_file(self) -> Path:
        return self.state / "cluster.json"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def log(self) -> Path:
        return self.state / "log"

    @property
    def run(self) -> Path:
        return self.state / "run"

    @property
    def disk(self) -> Path:
        """What the cluster's mount namespace shows under the usual names: containerd, kubelet, pod logs."""
        return self.state / "disk"

    @property
    def namespaces(self) -> Namespaces:
        return Namespaces(self.state / "ns")

    @property
    def kubeconfig(self) -> Path:
        """For the host; complete in itself."""
        return self.state / "kubeconfig"

    def inner_kubeconfig(self, user: str) -> Path:
        return self.config / f"{user}.kubeconfig"

    def binds(self) -> list[tuple[Path, str]]:
        """Folders of ours that stand at the usual places inside."""
        return [
            (self.disk / "containerd", "/var/lib/containerd"),
            (self.disk / "kubelet", "/var/lib/kubelet"),
            (self.disk / "pod-logs", "/var/log/pods"),
        ]

    def remember(self, memory: Memory) -> None:
        write_atomically(self.memory_file, json.dumps(asdict(memory)))

    def recall(self) -> Memory | None:
        """None when no cluster was ever started here. Raises ClusterError for a folder that is somebody else's, or a state we cannot read."""
        try:
            raw = json.loads(self.memory_file.read_text())
            memory = Memory(api_port=int(raw["api_port"]), router_port=int(raw["router_port"]), schema=int(raw["schema"]))
        except FileNotFoundError:
            strangers = sorted(p.name for p in self.state.iterdir() if p.name != "lock") if self.state.is_dir() else []
            if strangers:
                raise ClusterError(f"{self.state} is not empty ({strangers[0]}) and not a cluster; choose another folder with --state") from None
            return None
        except (ValueError, KeyError, TypeError) as e:
            raise ClusterError(f"{self.memory_file} is damaged ({e}); run `radixfleet local down --state {self.state}`") from e
        if memory.schema != SCHEMA:
            raise ClusterError(f"{self.state} is of another version of this tool; run `radixfleet local down --state {self.state}` first")
        return memory

    @contextmanager
    def locked(self, *, wait_s: float = 600.0) -> Iterator[None]:
        """One `up` or `down` at a time; the lock goes with its process, however that ends. Creates the state folder."""
        limit = time.monotonic() + wait_s
        path = self.state / "lock"
        while True:
            self.state.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(fd, path):  # else a `down` removed it while we waited
                    break
            except BlockingIOError:
                pass
            os.close(fd)
            if time.monotonic() > limit:
                raise ClusterError(f"another radixfleet local up/down works on {self.state} since {wait_s:.0f} s; wait for it or end it")
            time.sleep(0.1)
        try:
            yield
        finally:
            os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def write_atomically(path: Path, text: str, *, mode: int = 0o600) -> bool:
    """Writes a file whole or not at all; False (and nothing touched) when it already says that."""
    try:
        if path.read_text() == text:
            return False
    except (OSError, UnicodeDecodeError):
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)
    return True
