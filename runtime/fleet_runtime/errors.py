"""Causes for which a worker cannot start. A child leaves its cause in a file; the supervisor writes it to the termination message and exits."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from fleet_contract.names import START_FAILURES
from fleet_contract.worker import StartFailure

EXIT_START_FAILED: Final = 3  # exit code of a child that wrote its failure file


class StartError(Exception):
    """A worker cannot start. `reason` is one of START_FAILURES; the message says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        assert reason in START_FAILURES, reason
        super().__init__(message)
        self.reason = reason
        self.message = message


def failure_file(run_dir: str | Path, who: str) -> Path:
    """Where a child that cannot start leaves the cause."""
    return Path(run_dir) / f"{who}.failure"


def leave_failure(run_dir: str | Path, who: str, error: StartError) -> None:
    """Called by a child before it exits with EXIT_START_FAILED."""
    failure_file(run_dir, who).write_bytes(msgspec.json.encode(StartFailure(error.reason, error.message)))
