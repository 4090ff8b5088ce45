"""Causes for which a worker cannot start. The supervisor writes them to the termination message and exits."""

from __future__ import annotations

from fleet_contract.names import START_FAILURES


class StartError(Exception):
    """A worker cannot start. `reason` is one of START_FAILURES; the message says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        assert reason in START_FAILURES, reason
        super().__init__(message)
        self.reason = reason
        self.message = message
