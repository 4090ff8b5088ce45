"""One runtime's configuration, fully resolved before any child starts; the supervisor writes it to a file, every child reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from fleet_contract.launch import RuntimeLaunch

CONFIG_FILE: Final = "config.json"


class Identity(Struct, frozen=True):
    """Who this worker is, from the environment of its pod; outside a pod a UUID per process and empty names."""

    pod_uid: str
    pod_name: str = ""
    namespace: str = ""
    service: str = ""
    pod_ip: str = ""


class RuntimeConfig(Struct, frozen=True):
    """Everything a child needs to know. `run_dir` holds this file, the ipc sockets and the heartbeat board."""

    launch: dict[str, object]  # RuntimeLaunch.model_dump(mode="json")
    identity: Identity
    run_dir: str
    model_folder: str  # empty for simulated://
    model_revision: str  # 16 hex
    served_names: list[str]  # never empty: the launch's names, else the model's base name
    threads: int  # compute threads, resolved
    data_fd: int  # listening sockets, bound by the supervisor, inherited by http
    internal_fd: int
    data_port: int  # as bound
    internal_port: int

    def flags(self) -> RuntimeLaunch:
        """The launch, typed."""
        return RuntimeLaunch.model_validate(self.launch)

    def write(self) -> Path:
        """Writes the config file of `run_dir` and returns its path."""
        path = Path(self.run_dir) / CONFIG_FILE
        path.write_bytes(msgspec.json.encode(self))
        return path

    @classmethod
    def read(cls, run_dir: str | Path) -> RuntimeConfig:
        """Reads the config file of `run_dir`."""
        return msgspec.json.decode((Path(run_dir) / CONFIG_FILE).read_bytes(), type=cls)


def mint_incarnation() -> str:
    """16 hex digits, new for each start of a process."""
    return os.urandom(8).hex()
