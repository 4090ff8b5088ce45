"""The heartbeat board: one small file in shared memory that every process of a runtime writes its own row of.

`/livez` and `/readyz` answer from it in microseconds, whatever the scheduler is doing. A row has one writer; readers may see a row
between two writes of one update, which is harmless: each field stands alone. Each number is written whole, by one store of 8 aligned bytes
(`struct.pack_into` clears the bytes first and then fills in one after the other: a reader would take a process for dead that was only
interrupted there).
"""

from __future__ import annotations

import mmap
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
_U64_BYTES: Final = 8
_TEXT_AT: Final = 64
BOARD_FILE: Final = "heartbeat"

# What the scheduler counts, for http's /metrics, each with its HELP line. Names in `_total` but `pages_total` only grow within one incarnation; the
# others are gauges. One u64 each, behind the rows.
COUNTERS: Final = {
    "steps_total": "Steps that the engine has computed.",
    "prefilled_tokens_total": "Prompt tokens computed here; none on a worker that serves decode legs only.",
    "decode_tokens_total": "Tokens computed one by one for running answers: rows times steps.",
    "cached_tokens_total": "Prompt tokens that were in the prefix cache when their request got its pages.",
    "received_tokens_total": "Prompt tokens whose KV came from a prefill worker.",
    "finished_requests_total": "Requests (each choice is one) that ended well: by a stop, by length, handed over, or with their vector.",
    "failed_requests_total": "Requests that ended with an error, refused ones included, aborted ones not.",
    "aborted_requests_total": "Requests that were ended by their client or router.",
    "retractions_total": "Running requests that gave their pages back when those ran out, and were computed again.",
    "grammar_rows_total": "Tokens drawn under the mask of a grammar.",
    "wasted_tokens_total": "Tokens drawn for requests that had ended meanwhile.",
    "self_check_failures_total": "Times that the idle self-check found pages, rows or requests that do not add up, and repaired or failed them.",
    "scheduler_us_total": "Microseconds of processor time of the scheduler's own work, without what the engine computes.",
    "running_requests": "Requests that hold a row now: computed, handed over, or received.",
    "waiting_requests": "Requests that wait for a row and pages, or for their grammar.",
    "waiting_tokens": "Prompt tokens of those.",
    "pages_total": "KV pages of this worker, of 16 tokens each.",
    "pages_free": "KV pages that nobody holds.",
    "pages_tree": "KV pages of the prefix cache, those in use by requests included.",
    "pages_request": "KV pages that belong to one request alone.",
    "transfer_rooms_total": "Hand-overs between a prefill and a decode worker that ended well, on either side.",
    "transfer_failures_total": "Hand-overs that ended with an error.",
    "transfer_pages_total": "KV pages sent or received.",
    "transfer_bytes_total": "Bytes of KV sent or received.",
    "transfer_checksum_failures_total": "KV pages that arrived with a wrong checksum; their request fails.",
    "transfer_late_messages_total": "Messages about hand-overs that are over; they are ignored.",
}
_COUNTERS_AT: Final = _ROW_BYTES * len(_ROWS)
_BOARD_BYTES: Final = _COUNTERS_AT + _U64_BYTES * len(COUNTERS)


class Row:
    """One process's row. Writers set fields; readers get them. `beat_ns` is CLOCK_MONOTONIC."""

    _FIELDS: Final = {"phase": 0, "percent": 1, "beat_ns": 2, "steps": 3, "pending": 4, "inflight": 5}

    def __init__(self, memory: mmap.mmap, numbers: memoryview[int], offset: int) -> None:
        """`numbers`: the whole board as u64. `offset`: of the row, in bytes."""
        self._memory = memory
        self._numbers = numbers
        self._offset = offset
        self._first = offset // _U64_BYTES

    def _get(self, name: str) -> int:
        return self._numbers[self._first + self._FIELDS[name]]

    def set(self, **fields: int) -> None:
        """Writes the named fields: phase, percent (of loading), steps, pending (work that waits or runs), inflight (open requests)."""
        for name, value in fields.items():
            self._numbers[self._first + self._FIELDS[name]] = value

    def beat(self) -> None:
        """Called once per loop iteration: the loop goes round."""
        self._numbers[self._first + self._FIELDS["beat_ns"]] = time.monotonic_ns()

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
        self._numbers = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls, run_dir: str | Path) -> Board:
        path = Path(run_dir) / BOARD_FILE
        path.write_bytes(bytes(_BOARD_BYTES))
        return cls(path)

    @classmethod
    def open(cls, run_dir: str | Path) -> Board:
        return cls(Path(run_dir) / BOARD_FILE)

    def row(self, process: str) -> Row:
        return Row(self._memory, self._numbers, _ROW_BYTES * _ROWS.index(process))

    def set_counters(self, values: dict[str, int]) -> None:
        """Written by the scheduler only: every name of COUNTERS that is in `values`."""
        for i, name in enumerate(COUNTERS):
            if name in values:
                self._numbers[_COUNTERS_AT // _U64_BYTES + i] = values[name]

    def counters(self) -> dict[str, int]:
        """The scheduler's counters, by name."""
        return dict(zip(COUNTERS, self._numbers[_COUNTERS_AT // _U64_BYTES :], strict=True))
