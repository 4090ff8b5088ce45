"""The weights of a model folder as numpy arrays over the mapped files: one safetensors file or shards. No torch.

Called by the executors' loaders and by what checks memory. Names, types and shapes are compared with the model's description before the
first byte of data is read, and all faults are told at once. numpy has no bfloat16: such arrays are uint16, the upper half of a float32.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from fleet_runtime.errors import StartError
from fleet_runtime.models.families import checkpoint_names
from fleet_runtime.models.files import INDEX_FILE, weight_files, weight_map
from fleet_runtime.models.safetensors_file import TensorEntry, read_header, tensors_of
from fleet_runtime.models.spec import ModelSpec

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]

# Types that can be read, and as what numpy sees them.
FLOATS: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_MOST_NAMED: Final = 5  # faults of one kind that a message names
_PIECE: Final = 1 << 20  # numbers that are converted at once: what a conversion needs beside its result stays small


class WeightFiles:
    """The open weights of one model, under our names (`models.spec`). A context manager.

    An array that `get` gave out keeps its file mapped while it lives, so copy what must outlive the loading. Not thread-safe.
    """

    def __init__(self, entries: dict[str, TensorEntry], progress: Callable[[int, str], None]) -> None:
        """Args: entries: of each weight of the description, checked. progress: gets percent of bytes given out."""
        self._entries = entries
        self._progress = progress
        self._maps: dict[Path, mmap.mmap] = {}
        self._unread = {name: e.end - e.start for name, e in entries.items() if name != "head" or e is not entries["embedding"]}
        self._total = max(1, sum(self._unread.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> Array:
        """A weight as it lies in the file, not copied and not writable: float32, float16, float64, or uint16 for bfloat16.

        `head` of a tied model is the embedding. Raises KeyError for a weight that the model does not have.
        """
        entry = self._entries[name]
        data = self._map(entry.path)
        array = np.frombuffer(data, FLOATS[entry.dtype], count=entry.size, offset=entry.start).reshape(entry.shape)
        if self._unread.pop(name, None) is not None:
            self._progress(100 - 100 * sum(self._unread.values()) // self._total, "loading weights")
        return array if array.flags.aligned else array.copy()

    def dtype_of(self, name: str) -> str:
        """F32, F16, BF16 or F64."""
        return self._entries[name].dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """As `get(name).shape`, without reading."""
        return self._entries[name].shape

    def release(self, name: str) -> None:
        """Lets the kernel take back what was read of a weight's pages; reading it again stays possible. For use after it was copied."""
        entry = self._entries[name]
        if (data := self._maps.get(entry.path)) is not None:
            start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE  # the first and last page may belong to neighbours, too
            length = entry.end // mmap.PAGESIZE * mmap.PAGESIZE - start
            if length > 0:
                data.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Unmaps the files (those of arrays that still live: with the last of them)."""
        self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        data = self._maps.get(path)
        if data is None:
            with path.open("rb") as f:
                data = self._maps[path] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        return data


def open_weights(folder: Path, spec: ModelSpec, progress: Callable[[int, str], None] = lambda _p, _t: None) -> WeightFiles:
    """Compares the files of a folder with the description and opens them. Raises StartError(ModelInvalid) with every kind of fault."""
    found = read_entries(folder)
    names = checkpoint_names(spec)
    if names["embedding"] not in found and names["embedding"].removeprefix("model.") in found:
        names = {ours: theirs.removeprefix("model.") for ours, theirs in names.items()}  # saved without the head around it
    shapes = weight_shapes(spec)
    expected = {theirs: shapes[ours] for ours, theirs in names.items()}
    if faults := compare(expected, found, tied=spec.tied):
        raise StartError("ModelInvalid", f"{folder}: the weights do not fit config.json: {'; '.join(faults)}")
    entries = {ours: found[theirs] for ours, theirs in names.items()}
    if spec.tied:
        entries["head"] = entries["embedding"]
    return WeightFiles(entries, progress)


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a folder by the checkpoint's names, from the headers alone. Raises StartError(ModelInvalid)."""
    out: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        with path.open("rb") as f:
            found = tensors_of(path, read_header(path, f), os.fstat(f.fileno()).st_size)
        if twice := sorted(set(out) & set(found)):
            raise StartError("ModelInvalid", f"{folder}: {_some(twice)} is in {out[twice[0]].path.name} and in {path.name}; download it again")
        out |= found
    for name, file in sorted(weight_map(folder).items()):
        if name not in out or out[name].path.name != file:
            raise StartError("ModelInvalid", f"{folder}: {INDEX_FILE} says that {name} is in {file}, it is not; download it again")
    return out


def compare(expected: dict[str, tuple[int, ...]], found: dict[str, TensorEntry], *, tied: bool) -> list[str]:
    """What is missing, too much, or of another type or shape, in a sentence each. Pure."""
    faults = []
    if missing := sorted(set(expected) - set(found)):
        faults.append(f"missing tensors: {_some([f'{n} {list(expected[n])}' for n in missing])}")
    if extra := sorted(n for n in set(found) - set(expected) if not _is_unused(n, tied=tied)):
        faults.append(f"unexpected tensors: {_some([f'{n} {list(found[n].shape)}' for n in extra])}")
    wrong = []
    for name in sorted(set(expected) & set(found)):
        entry = found[name]
        if entry.dtype not in FLOATS:
            wrong.append(f"{name} is {entry.dtype} (quantised weights are not supported), allowed: {', '.join(sorted(FLOATS))}")
        elif entry.shape != expected[name]:
            wrong.append(f"{name} is {list(entry.shape)}, config.json says {list(expected[name])}")
    if wrong:
        faults.append(f"wrong tensors: {_some(wrong)}")
    return faults


def count_parameters(folder: Path) -> int:
    """Numbers in all tensors of a folder, from the headers alone. Raises StartError(ModelInvalid)."""
    return sum(entry.size for entry in read_entries(folder).values())


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a model, by our names; linear ones are [out, in]."""
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    model: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab_size, hidden), "final_norm": (hidden,), "head": (spec.vocab_size, hidden)}
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,), "mlp_norm": (hidden,), "attention_post_norm": (hidden,), "mlp_post_norm": (hidden,),
        "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
        "q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,), "o_bias": (hidden,), "q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner), "gate_bias": (inner,), "up_bias": (inner,),
        "down_bias": (hidden,),
    }  # fmt: skip
    return model | {f"{i}.{name}": shape for i in range(len(spec.layers)) for name, shape in layer.items()}


def to_float32(array: Array, out: F32 | None = None) -> F32:
    """An array of `WeightFiles.get` as float32, into `out` if given (same number of elements); always in memory of its own."""
    out = np.empty(array.shape, np.float32) if out is None else out
    source, target = array.reshape(-1), out.reshape(-1)
    assert out.flags.c_contiguous and len(source) == len(target)
    for start in range(0, len(source), _PIECE):
        piece = source[start : start + _PIECE]
        if piece.dtype == np.uint16:
            np.left_shift(piece, 16, out=target[start : start + _PIECE].view(np.uint32), dtype=np.uint32)
        else:
            target[start : start + _PIECE] = piece
    return out


def to_bf16(array: Array, out: U16 | None = None) -> U16:
    """An array of `WeightFiles.get` as bfloat16, rounded to the nearest, ties to even; NaN stays NaN. float64 goes through float32.

    Into `out` if given (same number of elements); always in memory of its own.
    """
    out = np.empty(array.shape, np.uint16) if out is None else out
    source, target = array.reshape(-1), out.reshape(-1)
    assert out.flags.c_contiguous and len(source) == len(target)
    for start in range(0, len(source), _PIECE):
        piece = source[start : start + _PIECE]
        target[start : start + _PIECE] = piece if piece.dtype == np.uint16 else _rounded(piece.astype(np.float32))
    return out


def _rounded(values: F32) -> U16:
    bits = values.view(np.uint32)
    out = ((bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    if (nan := np.isnan(values)).any():
        out[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x0040)  # the quiet bit: never an infinity
    return out


def _is_unused(name: str, *, tied: bool) -> bool:
    """Tensors that checkpoints hold and nobody needs: tables of older versions, a head that is the embedding once more."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _some(items: list[str]) -> str:
    more = len(items) - _MOST_NAMED
    return ", ".join(items[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
