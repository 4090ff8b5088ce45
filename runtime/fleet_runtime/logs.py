"""Logging of every process of a runtime: one JSON object a line on stderr, facts as fields. No prompt text, no secrets."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec


class _JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "facts", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode("utf-8", "replace")


def set_up_logging(process: str, level: str) -> None:
    """Sends everything from `level` on to stderr. Called once, first thing in a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def facts(**fields: object) -> dict[str, dict[str, object]]:
    """The `extra` of a log call: `log.info("model loaded", extra=facts(seconds=1.2))`."""
    return {"facts": fields}
