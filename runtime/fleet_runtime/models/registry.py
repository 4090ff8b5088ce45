"""From `architectures` of config.json to the file that can load it. One line here and one file make a new family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import torch

from fleet_runtime.errors import StartError
from fleet_runtime.models import llama
from fleet_runtime.models.base import CausalLm
from fleet_runtime.models.files import read_config


class Loader(Protocol):
    """Reads a folder whose architecture it knows."""

    def __call__(
        self, folder: Path, raw_config: dict[str, object], *, dtype: torch.dtype, context_length: int, progress: Callable[[int, str], None]
    ) -> CausalLm: ...


MODELS: Final[dict[str, Loader]] = {llama.ARCHITECTURE: llama.load}


def load_model(folder: Path, *, dtype: torch.dtype, context_length: int, progress: Callable[[int, str], None]) -> CausalLm:
    """Loads the model of a folder that `resolve_model` found. Raises StartError(ModelInvalid)."""
    raw = read_config(folder)
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    loader = MODELS.get(name) if isinstance(name, str) else None
    if loader is None:
        raise StartError("ModelInvalid", f"{folder / 'config.json'}: architectures is {names!r}; supported: {', '.join(MODELS)}")
    return loader(folder, raw, dtype=dtype, context_length=context_length, progress=progress)
