"""Child processes of `radixfleet serve`: started with a log file each, ended in order, never left behind.

A child dies with us even when we are killed: PR_SET_PDEATHSIG is set between fork and exec.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fleet_contract.lifeline import before_exec


@dataclass(slots=True)
class Child:
    """One started process and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Child:
        """Starts a process in a session of its own, so that Ctrl-C reaches only us and we end the children in order."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=before_exec(os.getpid()),
                env={**os.environ, **environment},
            )  # fmt: skip
        return cls(name, process, log)

    def exit_text(self) -> str | None:
        """None while it runs; else how it ended, in words, with the last lines it wrote."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        tail = "\n".join("    " + line for line in self.log.read_text(errors="replace").splitlines()[-8:])
        return f"{self.name} {how}; the end of {self.log}:\n{tail}"


def end_all(children: Sequence[Child], *, timeout_s: float) -> None:
    """SIGTERM to all, then SIGKILL to those that are left after `timeout_s`. Blocks until none runs."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    for child in children:
        try:
            child.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
