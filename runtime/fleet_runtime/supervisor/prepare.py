"""Everything that is settled before any child starts: model, sockets, folder, threads -> RuntimeConfig."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fleet_contract.cpus import find_threads
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.logs import facts
from fleet_runtime import messages as m
from fleet_runtime.config import RuntimeConfig
from fleet_runtime.errors import StartError
from fleet_runtime.models.files import executor_of, resolve_model
from fleet_runtime.supervisor.facts import identity_from_env

log = logging.getLogger(__name__)

_MAX_IPC_PATH: Final = 107  # sizeof(sockaddr_un.sun_path) - 1
_LONGEST_SOCKET: Final = max(len(f"/{who}.in") for who in (*m.CHILDREN, m.SUPERVISOR))
_SEND_BUFFER_BYTES: Final = 128 << 10  # bounds what a client that does not read can make the kernel hold
_BACKLOG: Final = 2048


class Prepared:
    """The configuration and the listening sockets behind its descriptors; owned by the supervisor until its end."""

    def __init__(self, config: RuntimeConfig, sockets: list[socket.socket]) -> None:
        self.config = config
        self.sockets = sockets

    @property
    def fds(self) -> list[int]:
        return [s.fileno() for s in self.sockets]

    def close(self) -> None:
        """Closes the sockets and removes the folder."""
        for s in self.sockets:
            s.close()
        shutil.rmtree(self.config.run_dir, ignore_errors=True)


def prepare(flags: RuntimeLaunch, env: Mapping[str, str]) -> Prepared:
    """Raises StartError with what the user should do."""
    started = time.monotonic()
    model = resolve_model(flags.model)
    executor_of(flags)
    log.info("model found", extra=facts(model=flags.model, folder=str(model.folder or ""), revision=model.revision, seconds=_since(started)))
    sockets = [listen(flags.host, flags.data_port, "--data-port")]
    try:
        sockets.append(listen(flags.internal_host, flags.internal_port, "--internal-port"))
        run_dir = make_run_dir(env)
    except StartError:
        for s in sockets:
            s.close()
        raise
    config = RuntimeConfig(
        launch=flags.model_dump(mode="json"),
        identity=identity_from_env(env),
        run_dir=run_dir,
        model_folder=str(model.folder or ""),
        model_revision=model.revision,
        served_names=list(flags.served_model_name) or [model.base_name],
        threads=find_threads(flags.threads),
        data_fd=sockets[0].fileno(),
        internal_fd=sockets[1].fileno(),
        data_port=sockets[0].getsockname()[1],
        internal_port=sockets[1].getsockname()[1],
    )
    return Prepared(config, sockets)


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket. Raises StartError PortInUse or BadFlag."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as e:
        sock.close()
        if getattr(e, "errno", None) == errno.EADDRINUSE:
            message = f"{flag} {port}: another process listens on {host}:{port}; end it, or choose another port (0: any free one)"
            raise StartError("PortInUse", message) from e
        raise StartError("BadFlag", f"{flag} {port}: cannot listen on {host}:{port}: {e}; give an address of this machine and a free port") from e
    return sock


def make_run_dir(env: Mapping[str, str]) -> str:
    """A new folder for sockets, configuration and heartbeat. Its path must be short: a socket's path has 107 bytes."""
    base = env.get("TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(base)) + len("/rf-12345678") + _LONGEST_SOCKET > _MAX_IPC_PATH:
        log.warning("TMPDIR is too long a path for sockets; /tmp is used", extra=facts(tmpdir=base))
        base = "/tmp"
    try:
        return tempfile.mkdtemp(prefix="rf-", dir=base)
    except OSError as e:
        raise StartError("CacheUnwritable", f"cannot make a folder in {base}: {e}; set TMPDIR to a folder that this user may write to") from e


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the whole new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _since(started: float) -> float:
    return round(time.monotonic() - started, 3)
