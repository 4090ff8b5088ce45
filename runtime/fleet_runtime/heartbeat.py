"""The heartbeat board: one small file in shared memory that every process of a runtime writes its own row of.

`/livez` and `/readyz` answer from it in microseconds, whatever the scheduler is doing. A row has one writer; readers may see a row
between two writes of one update, which is harmless: each field stands alone.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import Final

from fleet_runtime.messages import DETOKENIZER, HTTP, SCHEDULER, SUPERVISOR

PHASE_ABSENT: Final = 0  # never started
PHASE_STARTING: Final = 1
PHASE_READY: Final = 2
PHASE_DRAINING: Final = 3
PHASE_DEAD: Final = 4  # written by the supervisor for a child that is gone

_ROWS: Final = (SUPERVISOR, HTTP, DETOKENIZER, SCHEDULER)
_ROW_BYTES: Final = 512
_U64: Final = struct.Struct("<Q")
_TEXT_AT: Final = 64
BOARD_FILE: Final = "heartbeat"


class Row:
    """One process's row. Writers set fields; readers get them. `beat_ns` is CLOCK_MONOTONIC."""

    _FIELDS: Final = {"phase": 0, "percent": 8, "beat_ns": 16, "steps": 24, "pending": 32, "inflight": 40, "prefilled_tokens": 48}

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offset = offset

    def _get(self, name: str) -> int:
        return int(_U64.unpack_from(self._memory, self._offset + self._FIELDS[name])[0])

    def set(self, **fields: int) -> None:
        """Writes the named fields: phase, percent (of loading), steps, pending (work that waits or runs), inflight (open requests)."""
        for name, value in fields.items():
            _U64.pack_into(self._memory, self._offset + self._FIELDS[name], value)

    def beat(self) -> None:
        """Called once per loop iteration: the loop goes round."""
        _U64.pack_into(self._memory, self._offset + self._FIELDS["beat_ns"], time.monotonic_ns())

    def set_text(self, text: str) -> None:
        """A few words: the loading phase, or the cause of death."""
        data = text.encode()[: _ROW_BYTES - _TEXT_AT - 1]
        self._memory[self._offset + _TEXT_AT : self._offset + _ROW_BYTES] = data.ljust(_ROW_BYTES - _TEXT_AT, b"\0")

    @property
    def text(self) -> str:
        raw = self._memory[self._offset + _TEXT_AT : self._offset + _ROW_BYTES]
        return raw.rstrip(b"\0").decode("utf-8", "ignore")

    @property
    def phase(self) -> int:
        return self._get("phase")

    @property
    def percent(self) -> int:
        return self._get("percent")

    @property
    def steps(self) -> int:
        return self._get("steps")

    @property
    def pending(self) -> int:
        return self._get("pending")

    @property
    def inflight(self) -> int:
        return self._get("inflight")

    def silent_s(self) -> float:
        """Seconds since the last beat; infinite before the first."""
        beat = self._get("beat_ns")
        return (time.monotonic_ns() - beat) / 1e9 if beat else float("inf")


class Board:
    """The whole board; `create` in the supervisor, `open` in the children."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as f:
            self._memory = mmap.mmap(f.fileno(), _ROW_BYTES * len(_ROWS))

    @classmethod
    def create(cls, run_dir: str | Path) -> Board:
        path = Path(run_dir) / BOARD_FILE
        path.write_bytes(bytes(_ROW_BYTES * len(_ROWS)))
        return cls(path)

    @classmethod
    def open(cls, run_dir: str | Path) -> Board:
        return cls(Path(run_dir) / BOARD_FILE)

    def row(self, process: str) -> Row:
        return Row(self._memory, _ROW_BYTES * _ROWS.index(process))
