"""Logging of every process of the product: one JSON object a line on stderr, the same fields in all rooms. No prompt text, no secrets.

Fields: `ts` (RFC 3339, UTC, milliseconds), `level`, `process`, `logger`, `event` (plain words), then the facts, then `traceback`. Facts are given
as `extra=facts(request_id=…)`, or as any `extra` of plain values.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

_KNOWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "facts"}
_PLAIN: Final = str | int | float | bool | None


class JsonLines(logging.Formatter):
    """Formats a record as one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {k: v for k, v in vars(record).items() if k not in _KNOWN and isinstance(v, _PLAIN)}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(process: str, level: str) -> None:
    """Sends everything from `level` on to stderr. Called once, first thing in a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def facts(**fields: object) -> dict[str, dict[str, object]]:
    """The `extra` of a log call: `log.info("model loaded", extra=facts(seconds=1.2))`. A name that logging itself uses is allowed here."""
    return {"facts": fields}
