"""From a folder to a loaded torch model: the families we describe run on `decoder`. Called by the torch executor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fleet_runtime.models.base import CausalLm
from fleet_runtime.models.decoder import Decoder
from fleet_runtime.models.families import spec_of
from fleet_runtime.models.files import read_config
from fleet_runtime.models.weights import open_weights


def load_model(folder: Path, *, dtype: torch.dtype, context_length: int, progress: Callable[[int, str], None]) -> CausalLm:
    """Loads the model of a folder that `resolve_model` found. Raises StartError(ModelInvalid)."""
    spec = spec_of(folder, read_config(folder))
    with open_weights(folder, spec, progress) as weights:
        return Decoder(spec, weights, dtype=dtype, context_length=context_length)
