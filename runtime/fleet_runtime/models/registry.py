"""From a folder to a loaded torch model: the families we describe run on `decoder`, any other causal LM through transformers if that is there.

Called by the torch executor.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from fleet_runtime.errors import StartError
from fleet_runtime.models.base import CausalLm
from fleet_runtime.models.decoder import Decoder
from fleet_runtime.models.families import FAMILIES, architecture_of, is_known, spec_of
from fleet_runtime.models.files import read_config
from fleet_runtime.models.weights import open_weights


def load_model(folder: Path, *, dtype: torch.dtype, context_length: int, progress: Callable[[int, str], None]) -> CausalLm:
    """Loads the model of a folder that `resolve_model` found. Raises StartError(ModelInvalid)."""
    raw = read_config(folder)
    if is_known(raw) or architecture_of(raw) is None:
        spec = spec_of(folder, raw)
        with open_weights(folder, spec, progress) as weights:
            return Decoder(spec, weights, dtype=dtype, context_length=context_length)
    if find_spec("transformers") is None:
        raise StartError(
            "ModelInvalid",
            f"{folder / 'config.json'}: architectures is {raw['architectures']!r}; supported: {', '.join(FAMILIES)}; most other causal LMs "
            "run through transformers: install radixfleet[transformers]",
        )
    from fleet_runtime.models import transformers_fallback  # optional, and slow to import

    return transformers_fallback.load(folder, dtype=dtype, progress=progress)
