"""Rotary frequencies from config.json, with the ways to stretch them beyond the trained context. Called by `families`; no torch.

Sources: Su et al., "RoFormer", section 3.2.2 (frequencies theta ** (-2i / d)); Peng et al., "YaRN", section 3 and appendix A.2 (blend by
wavelength, attention factor 0.1 ln s + 1); Meta's release notes of Llama 3.1 (llama3: long waves slowed, short ones kept, a blend between).
The fields and their defaults are those of transformers' config.json. "dynamic" changes frequencies with the length of the text, but only
beyond max_position_embeddings: within it, which is all we serve then, it equals "default".
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fleet_runtime.models.config_fields import Fields
from fleet_runtime.models.spec import Rope

KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn")
_KNOWN: Final = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned",
}  # fmt: skip

F64 = npt.NDArray[np.float64]


def read_rope(fields: Fields, config: Fields, *, head_dim: int, theta: float, max_positions: int) -> tuple[Rope, int]:
    """Frequencies of one kind of layer, and the longest context they serve.

    Args: fields: rope_parameters or rope_scaling. config: the whole config.json. theta: the base if `fields` has none. max_positions:
    max_position_embeddings.
    """
    theta = fields.number("rope_theta", theta)
    kind = _kind(fields)
    if unknown := sorted(k for k, v in fields.raw.items() if k not in _KNOWN and v is not None):
        fields.fault(f"{unknown[0]} is set; models with it are not supported")
    for place in (fields, config):
        if place.raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            place.fault(f"partial_rotary_factor is {place.raw['partial_rotary_factor']!r}; models with it not 1 are not supported")
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor, reach = 1.0, max_positions
    if kind == "linear":
        stretch = fields.number("factor")
        frequencies = frequencies / stretch
        reach = int(max_positions * max(1.0, stretch))
    elif kind == "llama3":
        frequencies = _llama3(fields, frequencies, _original(fields, config, max_positions))
    elif kind == "yarn":
        original = _original(fields, config, max_positions)
        stretch = fields.number("factor", max_positions / original)
        frequencies = _yarn(fields, frequencies, theta, stretch, original)
        factor = _attention_factor(fields, stretch)
        reach = max(max_positions, int(original * stretch))
    return Rope(inv_freq=frequencies.astype(np.float32), factor=factor), reach


def _kind(fields: Fields) -> str:
    name = "type" if fields.raw.get("rope_type") is None else "rope_type"
    return fields.choice(name, "default", KINDS)


def _original(fields: Fields, config: Fields, max_positions: int) -> int:
    """Positions of the training before the stretch; a value beside the rope's own wins."""
    name = "original_max_position_embeddings"
    return config.integer(name) if config.raw.get(name) is not None else fields.integer(name, max_positions)


def _llama3(fields: Fields, frequencies: F64, original: int) -> F64:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        fields.fault(f"high_freq_factor is {high}, must be above low_freq_factor {low}")
        return frequencies
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * frequencies / fields.number("factor") + kept * frequencies


def _yarn(fields: Fields, frequencies: F64, theta: float, stretch: float, original: int) -> F64:
    if theta <= 1.0:
        fields.fault(f"rope_theta is {theta}, must be above 1 for yarn")
        return frequencies
    dim = 2 * len(frequencies)
    fast, slow = _or_default(fields, "beta_fast", 32.0), _or_default(fields, "beta_slow", 1.0)

    def place(turns: float) -> float:
        """The (fractional) frequency that makes so many turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(fast), place(slow)
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    blended: F64 = slowed * frequencies / stretch + (1 - slowed) * frequencies
    return blended


def _attention_factor(fields: Fields, stretch: float) -> float:
    if fields.raw.get("attention_factor") is not None:
        return fields.number("attention_factor")
    scale, all_dims = _or_default(fields, "mscale", 0.0), _or_default(fields, "mscale_all_dim", 0.0)
    log = math.log(stretch) if stretch > 1 else 0.0
    if scale and all_dims:
        return (0.1 * scale * log + 1) / (0.1 * all_dims * log + 1)
    return 0.1 * log + 1


def _or_default(fields: Fields, name: str, default: float) -> float:
    """A number; null and 0 mean the default."""
    value: Any = fields.raw.get(name)
    return default if value is None or (value == 0 and not isinstance(value, bool)) else fields.number(name)
