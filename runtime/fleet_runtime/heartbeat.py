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

# What the scheduler counts, for http's /metrics. Names in `_total` only grow within one incarnation; the others are gauges. One u64 each,
# behind the rows.
COUNTERS: Final = (
    "steps_total",
    "prefilled_tokens_total",  # prompt tokens computed here; stays 0 on a worker that serves decode legs only
    "decode_tokens_total",  # rows x steps of one token
    "cached_tokens_total",  # prompt tokens found in the prefix cache at admission
    "received_tokens_total",  # prompt tokens whose KV came from a prefill worker
    "finished_requests_total",
    "failed_requests_total",
    "aborted_requests_total",
    "retractions_total",  # running requests that gave their pages back and were computed again
    "grammar_rows_total",  # masks of tokens that a grammar allows
    "wasted_tokens_total",  # drawn for requests that had ended meanwhile
    "self_check_failures_total",
    "scheduler_us_total",  # processor time of the scheduler's own work, without what the executor computes
    "running_requests",
    "waiting_requests",
    "waiting_tokens",
    "pages_total",
    "pages_free",
    "pages_tree",
    "pages_request",
    "transfer_rooms_total",  # rooms that ended well, on either side
    "transfer_failures_total",
    "transfer_pages_total",
    "transfer_bytes_total",
    "transfer_checksum_failures_total",
    "transfer_late_messages_total",  # of a generation that is over: ignored
)
_COUNTERS_AT: Final = _ROW_BYTES * len(_ROWS)
_BOARD_BYTES: Final = _COUNTERS_AT + 8 * len(COUNTERS)


class Row:
    """One process's row. Writers set fields; readers get them. `beat_ns` is CLOCK_MONOTONIC."""

    _FIELDS: Final = {"phase": 0, "percent": 8, "beat_ns": 16, "steps": 24, "pending": 32, "inflight": 40}

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
            self._memory = mmap.mmap(f.fileno(), _BOARD_BYTES)

    @classmethod
    def create(cls, run_dir: str | Path) -> Board:
        path = Path(run_dir) / BOARD_FILE
        path.write_bytes(bytes(_BOARD_BYTES))
        return cls(path)

    @classmethod
    def open(cls, run_dir: str | Path) -> Board:
        return cls(Path(run_dir) / BOARD_FILE)

    def row(self, process: str) -> Row:
        return Row(self._memory, _ROW_BYTES * _ROWS.index(process))

    def set_counters(self, values: dict[str, int]) -> None:
        """Written by the scheduler only: every name of COUNTERS that is in `values`."""
        for i, name in enumerate(COUNTERS):
            if name in values:
                _U64.pack_into(self._memory, _COUNTERS_AT + 8 * i, values[name])

    def counters(self) -> dict[str, int]:
        """The scheduler's counters, by name."""
        return {name: int(_U64.unpack_from(self._memory, _COUNTERS_AT + 8 * i)[0]) for i, name in enumerate(COUNTERS)}
