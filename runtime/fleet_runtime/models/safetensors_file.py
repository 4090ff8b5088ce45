"""The header of a safetensors file: which tensors it holds, of which type and shape, at which bytes. Called by `files` and `weights`.

Everything that a header can get wrong is found here, before any data is read. Standard library only. Source: the format's description (u64
length, little-endian; JSON; data; every byte of the data belongs to one tensor).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from fleet_runtime.errors import StartError

MAX_HEADER_BYTES: Final = 100_000_000  # limit of the format
METADATA: Final = "__metadata__"
# Bits of one number of each type of the format.
_BITS: Final = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: bytes [start, end), counted from the file's begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)


def read_header(path: Path, f: BinaryIO) -> bytes:
    """The JSON of a file that was just opened. Raises StartError(ModelInvalid)."""
    head = f.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise StartError("ModelInvalid", f"{path} is not a safetensors file (header length {length}); download it again")
    header = f.read(length)
    if len(header) != length:
        raise StartError("ModelInvalid", f"{path} ends inside its header: it was copied in part; copy it again")
    return header


def tensors_of(path: Path, header: bytes, file_size: int) -> dict[str, TensorEntry]:
    """The tensors of a file by name, checked: types, shapes, bounds, and that their bytes lie end to end. Raises StartError(ModelInvalid)."""
    data_start = 8 + len(header)
    data_size = file_size - data_start
    out = {name: _entry(path, name, value, data_start) for name, value in parse_object(path, header).items() if name != METADATA}
    reached, before = 0, ""
    for name, entry in sorted(out.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end - data_start > data_size:
            raise StartError(
                "ModelInvalid",
                f"{path} has {data_size} bytes of data, {name!r} ends at {entry.end - data_start}: it was copied in part; copy it again",
            )
        if entry.start - data_start != reached:
            what = f"overlaps {before!r}" if entry.start - data_start < reached else "leaves a gap before it"
            raise StartError("ModelInvalid", f"{path}: {name!r} begins at {entry.start - data_start} and {what}; download it again")
        reached, before = entry.end - data_start, name
    if reached != data_size:
        raise StartError("ModelInvalid", f"{path} has {data_size} bytes of data, its header tells of {reached}; download it again")
    return out


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    entry = value if isinstance(value, dict) else {}
    offsets, shape, dtype = entry.get("data_offsets"), entry.get("shape"), entry.get("dtype")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_count(o) for o in offsets) and offsets[0] <= offsets[1]):
        raise StartError("ModelInvalid", f"{path}: the header's entry of {name!r} has no valid data_offsets; download it again")
    if not (isinstance(shape, list) and all(_is_count(n) for n in shape)):
        raise StartError("ModelInvalid", f"{path}: the header's entry of {name!r} has no valid shape; download it again")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise StartError("ModelInvalid", f"{path}: {name!r} has the type {dtype!r}; known: {', '.join(_BITS)}")
    wanted = -(-math.prod(shape) * _BITS[dtype] // 8)
    if offsets[1] - offsets[0] != wanted:
        raise StartError(
            "ModelInvalid", f"{path}: {name!r} is {dtype} {shape} and has {offsets[1] - offsets[0]} bytes, needs {wanted}; download it again"
        )
    return TensorEntry(path, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_object(path: Path, data: bytes) -> dict[str, Any]:
    """A JSON object. Raises StartError(ModelInvalid), also for a key that comes twice."""
    try:
        value = json.loads(data, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as e:
        raise StartError("ModelInvalid", f"{path} is not JSON: {e}; download it again") from e
    if not isinstance(value, dict):
        raise StartError("ModelInvalid", f"{path} is not a JSON object; download it again")
    return value


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key comes twice")
    return out
