"""What every process of the router does first: logging, dying with its parent, reading what the supervisor handed over."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import time
from typing import Any, Final

import msgspec
from msgspec import Struct

from fleet_router.settings import Settings

PR_SET_PDEATHSIG: Final = 1  # prctl(2)


class Handover(Struct, frozen=True):
    """Argument of a child process, as JSON: settings, inherited sockets by number, the link's name, the parent to die with."""

    settings: Settings
    parent_pid: int
    link_name: str
    listen_fd: int
    link_fd: int = -1


class _JsonLines(logging.Formatter):
    """One JSON object a line; fields given as `extra` beside the message."""

    _known: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(), "process": self._process, "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        out |= {k: v for k, v in vars(record).items() if k not in self._known}
        if record.exc_info:
            out["error"] = self.formatException(record.exc_info)
        return json.dumps(out, default=str)


def set_up_logging(process: str, level: str) -> None:
    """JSON lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent dies; ends it now when that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)


def raise_file_limit() -> int:
    """Lets this process open as many files as its hard limit says: each stream takes up to three. Returns that number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def read_handover(argv: list[str]) -> Handover:
    """The child's one argument."""
    return msgspec.json.decode(argv[1], type=Handover)
