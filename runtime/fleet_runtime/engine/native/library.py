"""The native library through ctypes: its structs field by field (src/abi.h), and finding or building the one for this CPU.

Calls release the interpreter's lock. The only caller is the native executor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fleet_runtime.engine.native.build import BuildError, build, find_library, this_cpu

ABI: Final = 2
OK, BAD_PAGE, NO_MEMORY, NO_FORWARD = range(4)
DTYPE_F32, DTYPE_BF16 = 0, 1
_LONG: Final = 1 << 15  # bytes from which an input is not copied
# What phases of a step do, in the order of pool.h.
KINDS: Final = ("embed", "input", "qkv", "write kv", "attention", "out", "gate up", "down", "norm", "head", "sample", "other")


class NoLibrary(Exception):
    """There is no library for this machine, and none can be made; the message says why and what to do."""


class ModelDesc(Structure):
    """rf_model_desc."""

    _fields_ = (
        [(n, c_int32) for n in "vocab hidden inter heads kv_heads head_dim layers ropes tied qk_norm post_norms gelu int8 slots".split()]
        + [(n, c_float) for n in "norm_eps attention_scale embedding_scale attention_softcap logit_softcap".split()]
        + [(n, c_void_p) for n in "windows layer_ropes inv_freq rope_factors".split()]
    )


class StepDesc(Structure):
    """rf_step."""

    _fields_ = [(n, c_int32) for n in "rows tokens table_width places".split()] + [
        (n, c_void_p)
        for n in (
            "token_ids positions row_starts context_lens page_tables sample slots prompt_logprobs next_ids pool place_starts top_starts"
            " failed pooled chosen top_ids top_values"
        ).split()
    ]


class SamplingDesc(Structure):
    """rf_sampling."""

    _fields_ = [(n, c_int32) for n in ("rows", "mask_words")] + [
        (n, c_void_p)
        for n in (
            "temperature top_k top_p min_p seed logprobs bias_starts bias_ids bias_values count_starts count_ids counts repetition frequency"
            " presence masks mask_rows top_starts tokens failed chosen top_ids top_values"
        ).split()
    ]


_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "rf_abi": (c_int32, []),
    "rf_create": (c_void_p, [POINTER(ModelDesc), c_int32]),
    "rf_destroy": (None, [c_void_p]),
    "rf_put": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32]),
    "rf_page_bytes": (c_int64, [c_void_p]),
    "rf_reserve": (c_int32, [c_void_p, c_int64]),
    "rf_pages": (c_void_p, [c_void_p]),
    "rf_forget": (None, [c_void_p]),
    "rf_forward": (c_int32, [c_void_p, POINTER(StepDesc)]),
    "rf_step_and_sample": (c_int32, [c_void_p, POINTER(StepDesc), POINTER(SamplingDesc)]),
    "rf_sample": (c_int32, [c_void_p, POINTER(SamplingDesc)]),
    "rf_profile": (None, [c_void_p, c_int32, c_void_p]),
    "rf_logits": (POINTER(c_float), [c_void_p, POINTER(c_int64)]),
}


def load_library(level: str | None = None) -> tuple[ctypes.CDLL, str]:
    """The library for this CPU and its level, built if need be. level: another than the best one (tests). Raises NoLibrary."""
    levels = this_cpu()
    if not levels:
        raise NoLibrary("this CPU has no AVX2 (or the system is not Linux on x86-64), which the native executor needs; take --executor torch")
    if level is not None and level not in levels:
        raise NoLibrary(f"this CPU cannot run level {level}; it can run {', '.join(levels)}")
    level = level or levels[0]
    path = find_library(level)
    if path is None:
        try:
            path = build(level)
        except BuildError as e:
            raise NoLibrary(f"the native library was not built and cannot be: {e}; run `make setup`, or take --executor torch") from e
    return open_library(path), level


def open_library(path: Path) -> ctypes.CDLL:
    """Loads one file and declares its functions. Raises NoLibrary."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as e:
        raise NoLibrary(f"{path} cannot be loaded: {e}; remove it and run `make setup`, or take --executor torch") from e
    if (abi := library.rf_abi()) != ABI:
        raise NoLibrary(f"{path} has interface {abi}, this version needs {ABI}; remove it and run `make setup`")
    return library


def address(array: npt.NDArray[Any] | None) -> int | None:
    """Where an array lies, for a struct's pointer; None for none. The caller keeps the array until the call is over."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data


def fitting(array: npt.NDArray[Any] | None, dtype: type[np.generic]) -> npt.NDArray[Any] | None:
    """The array as the library reads it: contiguous, of this type; the same one if it is so already."""
    return None if array is None else np.ascontiguousarray(array, dtype)


class Block:
    """The arrays of one call: what it reads is copied into one piece of memory, behind which lies what it writes.

    numpy takes microseconds to say where an array lies, a call has dozens of them, and meanwhile the compute threads do nothing. Long inputs stay
    where they are. Outputs keep the memory; the caller keeps the block until the call is over.
    """

    def __init__(
        self, inputs: Iterable[tuple[str, npt.NDArray[Any] | None, type[np.generic]]], outputs: Iterable[tuple[str, int, type[np.generic]]]
    ) -> None:
        """inputs: (name, array or None for none, type). outputs: (name, numbers, type); they begin as zeros."""
        self._places: dict[str, int] = {}
        self._long: dict[str, npt.NDArray[Any]] = {}
        self._outputs: dict[str, npt.NDArray[Any]] = {}
        parts, size = [], 0
        for name, array, dtype in inputs:
            if array is None:
                continue
            if array.nbytes > _LONG:
                self._long[name] = np.ascontiguousarray(array, dtype)
                continue
            raw = array.astype(dtype, copy=False).tobytes()
            raw += b"\0" * (-len(raw) % 8)
            parts.append(raw)
            self._places[name] = size
            size += len(raw)
        written = []
        for name, count, dtype in outputs:
            written.append((name, count, dtype, size))
            self._places[name] = size
            size += -(-count * dtype().itemsize // 8) * 8
        memory = bytearray(b"".join(parts))
        memory.extend(bytes(size + 8 - len(memory)))  # never empty
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for name, count, dtype, at in written:
            self._outputs[name] = np.frombuffer(memory, dtype, count, at)
        self._memory = memory

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """An output."""
        return self._outputs[name]

    def addresses(self) -> dict[str, int | None]:
        """Where each array lies, by name, for a struct's pointers."""
        out: dict[str, int | None] = {name: self._base + place for name, place in self._places.items()}
        return out | {name: address(array) for name, array in self._long.items()}
