"""Child processes: start them so that none outlives the supervisor, and find out how they ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleet_contract.lifeline import before_exec
from fleet_contract.worker import StartFailure, decode_start_failure
from fleet_runtime import messages as m
from fleet_runtime.config import mint_incarnation
from fleet_runtime.errors import failure_file

MODULES: Final = {
    m.SCHEDULER: "fleet_runtime.scheduler.process",
    m.DETOKENIZER: "fleet_runtime.detokenizer.process",
    m.HTTP: "fleet_runtime.server.process",
}


@dataclass(slots=True)
class Child:
    """One life of one child process."""

    who: str
    incarnation: str
    process: subprocess.Popen[bytes]
    started_at: float = field(default_factory=time.monotonic)
    ready: bool = False
    info: m.SchedulerInfo | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it lives. Reaps it."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal, unless it is already reaped."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """True when it ended in time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def read_failure(run_dir: str | Path, who: str) -> StartFailure | None:
    """The StartFailure of a child that exited with EXIT_START_FAILED."""
    try:
        return decode_start_failure(failure_file(run_dir, who).read_text())
    except OSError:
        return None


def spawn(who: str, run_dir: str, *, fds: Sequence[int] = (), modules: Mapping[str, str] = MODULES) -> Child:
    """Starts a child with a new incarnation. It inherits `fds`, has a session of its own (a Ctrl-C of the terminal is the supervisor's
    to handle) and is killed by the kernel when the supervisor's main thread is gone."""
    incarnation = mint_incarnation()
    failure_file(run_dir, who).unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", modules[who], run_dir, incarnation],
        stdin=subprocess.DEVNULL,
        pass_fds=tuple(fds),
        start_new_session=True,
        preexec_fn=before_exec(os.getpid()),
    )
    return Child(who, incarnation, process)
