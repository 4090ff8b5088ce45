"""Reads the safetensors of a model folder into torch tensors: one file or shards, cast to the dtype of the run.

Called by the model files. Names and shapes are checked before the first byte of data is read, and all faults are told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from fleet_runtime.errors import StartError
from fleet_runtime.models.files import weight_files

_FLOATS: Final = {"F32", "F16", "BF16"}
_MOST_NAMED: Final = 5  # faults of one kind that a message names


class Weights:
    """The open weight files of a model. A context manager: it maps the files, and lets them go at its end."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, progress: Callable[[int, str], None] = lambda _p, _t: None) -> None:
        """Args: dtype: of the tensors given out. progress: gets percent of bytes read. Raises StartError(ModelInvalid)."""
        self._folder = folder
        self._dtype = dtype
        self._progress = progress
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}  # tensor name -> open file
        self._bytes_left: dict[str, int] = {}
        for path in weight_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as e:
                self._stack.close()
                raise StartError("ModelInvalid", f"{path} cannot be read: {e}; download it again") from e
            self._where.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def check(self, expected: Mapping[str, tuple[int, ...]], *, ignored: Callable[[str], bool]) -> None:
        """Compares names, shapes and types with what the model needs; `ignored` names tensors that may be there unused.

        Raises StartError(ModelInvalid) with every kind of fault.
        """
        faults = []
        if missing := sorted(set(expected) - set(self._where)):
            faults.append(f"missing tensors: {_some(missing)}")
        if unexpected := sorted(n for n in set(self._where) - set(expected) if not ignored(n)):
            faults.append(f"unexpected tensors: {_some(unexpected)}")
        wrong = []
        for name in sorted(set(expected) & set(self._where)):
            view = self._where[name].get_slice(name)
            if view.get_dtype() not in _FLOATS:
                wrong.append(f"{name} is {view.get_dtype()}, allowed: {', '.join(sorted(_FLOATS))}")
            elif (shape := tuple(view.get_shape())) != expected[name]:
                wrong.append(f"{name} is {list(shape)}, config.json says {list(expected[name])}")
            self._bytes_left[name] = torch.Size(expected[name]).numel()
        if wrong:
            faults.append(f"wrong tensors: {_some(wrong)}")
        if faults:
            raise StartError("ModelInvalid", f"{self._folder}: the weights do not fit config.json: {'; '.join(faults)}")
        self._total = max(1, sum(self._bytes_left.values()))

    def count(self) -> int:
        """Numbers in all tensors of the files."""
        return sum(torch.Size(file.get_slice(name).get_shape()).numel() for name, file in self._where.items())

    def take(self, name: str) -> torch.Tensor:
        """One checked tensor, in the dtype of the run, in memory of its own."""
        return self.stack([name])

    def stack(self, names: list[str]) -> torch.Tensor:
        """Several checked tensors joined along their first dimension."""
        views = [self._where[name].get_slice(name).get_shape() for name in names]
        out = torch.empty((sum(s[0] for s in views), *views[0][1:]), dtype=self._dtype)
        row = 0
        for name in names:
            tensor = self._where[name].get_tensor(name)
            out[row : row + tensor.shape[0]].copy_(tensor)
            row += tensor.shape[0]
            self._bytes_left.pop(name, None)
        self._progress(100 - 100 * sum(self._bytes_left.values()) // self._total, "loading weights")
        return out


def count_parameters(folder: Path) -> int:
    """Numbers in all tensors of a folder, from the headers alone. Raises StartError(ModelInvalid)."""
    with Weights(folder, dtype=torch.float32) as weights:
        return weights.count()


def _some(items: list[str]) -> str:
    more = len(items) - _MOST_NAMED
    return ", ".join(items[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
