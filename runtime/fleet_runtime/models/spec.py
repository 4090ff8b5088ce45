"""One compact description of a decoder-only model, shared by all executors: what its layers do and which numbers they need.

Made from config.json by `models.families` (one small function per family), read by `models.decoder` (torch) and by the native executor.
No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding, halves convention (dimension d pairs with d + head_dim / 2).

    inv_freq: [head_dim / 2] float32, scaling (linear, llama3, ...) already in it. factor: multiplies cos and sin (YaRN's attention factor).
    """

    inv_freq: npt.NDArray[np.float32]
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs between the layers of one model."""

    window: int = 0  # sliding window, tokens, the token itself included; 0: full attention
    rope: int = 0  # index into ModelSpec.ropes


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """x = embed * embedding_scale; each layer: x += attn(norm(x)); x += mlp(norm(x)); logits = head(norm(x)).

    post_norms: a norm on each branch's output, too.

    Norms are RMSNorm with weight (w + norm_offset). qk_norm: RMSNorm over head_dim on each head of q and k before the rotation.
    MLP: down(act(gate) * up). Softcaps: cap * tanh(x / cap), 0 = none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float  # usually head_dim ** -0.5
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0


# Names under which weights are asked for (fleet_runtime.models.weights): of the model, and of layer i as f"{i}.{name}".
MODEL_WEIGHTS = ("embedding", "final_norm", "head")  # head: absent when tied
LAYER_WEIGHTS = (
    "input_norm", "q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm", "attention_post_norm",
    "mlp_norm", "gate", "up", "down", "gate_bias", "up_bias", "down_bias", "mlp_post_norm",
)  # fmt: skip
