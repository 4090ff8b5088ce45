"""The Llama family (Llama 1-3, SmolLM, SmolLM2 and others of the architecture LlamaForCausalLM) in plain torch.

Called by the registry and by executors. q, k, v are one projection and so are gate and up. Source: Touvron et al., "LLaMA" and
"Llama 2" (RMSNorm, SwiGLU, rotary embedding, grouped-query attention); Hugging Face's field names of config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from fleet_runtime.errors import StartError
from fleet_runtime.models.base import Attention, KvShape
from fleet_runtime.models.weights import Weights

ARCHITECTURE: Final = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. kind: default, linear, or llama3 (the last three numbers are only for llama3)."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The fields of config.json that this family needs, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_context: int
    tied: bool

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: Path) -> LlamaConfig:
        """Raises StartError(ModelInvalid) that names every wrong or unsupported field."""
        fields = _Fields(raw)
        heads = fields.integer("num_attention_heads")
        hidden = fields.integer("hidden_size")
        kv_heads = fields.integer("num_key_value_heads", heads)
        head_dim = fields.integer("head_dim", hidden // heads)
        theta, scaling = _rope(fields, raw)
        config = cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            layers=fields.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_context=fields.integer("max_position_embeddings", 2048),
            tied=fields.flag("tie_word_embeddings"),
        )
        if heads % kv_heads:
            fields.fault(f"num_key_value_heads is {kv_heads}, must divide num_attention_heads {heads}")
        if head_dim % 2:
            fields.fault(f"head_dim is {head_dim}, must be even")
        for name in ("attention_bias", "mlp_bias", "quantization_config"):
            if raw.get(name):
                fields.fault(f"{name} is set; models with it are not supported")
        if (act := raw.get("hidden_act", "silu")) != "silu":
            fields.fault(f"hidden_act is {act!r}, supported: 'silu'")
        if fields.faults:
            raise StartError("ModelInvalid", f"{where}: {'; '.join(fields.faults)}")
        return config

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the checkpoint."""
        hidden, inner, q, kv = self.hidden_size, self.intermediate_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        out: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            out["lm_head.weight"] = (self.vocab_size, hidden)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            out |= {
                f"{p}input_layernorm.weight": (hidden,),
                f"{p}post_attention_layernorm.weight": (hidden,),
                f"{p}self_attn.q_proj.weight": (q, hidden),
                f"{p}self_attn.k_proj.weight": (kv, hidden),
                f"{p}self_attn.v_proj.weight": (kv, hidden),
                f"{p}self_attn.o_proj.weight": (hidden, q),
                f"{p}mlp.gate_proj.weight": (inner, hidden),
                f"{p}mlp.up_proj.weight": (inner, hidden),
                f"{p}mlp.down_proj.weight": (hidden, inner),
            }
        return out


class _Fields:
    """Reads typed fields of config.json and collects the faults; a wrong field reads as 1 meanwhile."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self.faults: list[str] = []

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.fault(f"{name} is missing" if value is None else f"{name} is {value!r}, must be a whole number above 0")
        return 1

    def number(self, name: str, default: float, raw: dict[str, Any] | None = None) -> float:
        value = (self._raw if raw is None else raw).get(name)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self.fault(f"{name} is {value!r}, must be a number above 0")
        return 1.0

    def flag(self, name: str) -> bool:
        value = self._raw.get(name, False)
        if not isinstance(value, bool):
            self.fault(f"{name} is {value!r}, must be true or false")
        return value is True


def _rope(fields: _Fields, raw: dict[str, Any]) -> tuple[float, RopeScaling]:
    """Base and scaling, from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling` (older ones)."""
    values = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(values, dict):
        fields.fault(f"rope_scaling is {values!r}, must be an object or null")
        return 1.0, RopeScaling()
    theta = fields.number("rope_theta", fields.number("rope_theta", 10_000.0), values)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        scaling = RopeScaling()
    elif kind == "linear":
        scaling = RopeScaling(kind="linear", factor=fields.number("factor", 1.0, values))
    elif kind == "llama3":
        low, high = fields.number("low_freq_factor", 1.0, values), fields.number("high_freq_factor", 4.0, values)
        if high <= low:
            fields.fault(f"high_freq_factor is {high}, must be above low_freq_factor {low}")
        original = fields.number("original_max_position_embeddings", 8192, values)
        scaling = RopeScaling("llama3", fields.number("factor", 1.0, values), low, high, int(original))
    else:
        fields.fault(f"rope_scaling's type is {kind!r}, supported: default, linear, llama3")
        scaling = RopeScaling()
    if fields.number("partial_rotary_factor", 1.0, values) != 1.0 or raw.get("partial_rotary_factor", 1.0) != 1.0:
        fields.fault("partial_rotary_factor is not 1; models with it are not supported")
    return theta, scaling


def rope_table(config: LlamaConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position and frequency, each [length, head_dim / 2] float32.

    Source: Su et al., "RoFormer", section 3.2.2; llama3 scaling as in Meta's release notes of Llama 3.1: long waves are slowed by `factor`,
    short ones kept, those between are blended.
    """
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "llama3":
        waves = scaling.original_context * frequencies / (2 * math.pi)  # full turns within the original context
        kept = ((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
        frequencies = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one block."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    out: torch.Tensor  # [hidden, heads * head_dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


class Llama:
    """A loaded model of the family; see `CausalLm`. Owns its weights."""

    def __init__(self, config: LlamaConfig, weights: Weights, context_length: int) -> None:
        """Args: weights: of the model's folder, open; nothing of it is kept. context_length: positions that will be used.

        Raises StartError(ModelInvalid).
        """
        weights.check(config.tensors(), ignored=lambda n: n.endswith("rotary_emb.inv_freq") or (config.tied and n == "lm_head.weight"))
        self.config = config
        self._embed = weights.take("model.embed_tokens.weight")
        self._layers = [_load_layer(weights, f"model.layers.{i}.") for i in range(config.layers)]
        self._norm = weights.take("model.norm.weight")
        self._head = self._embed if config.tied else weights.take("lm_head.weight")
        self._cos, self._sin = rope_table(config, context_length)

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(layers=self.config.layers, kv_heads=self.config.kv_heads, head_dim=self.config.head_dim)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_context(self) -> int:
        return self.config.max_context

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """See CausalLm.forward."""
        c = self.config
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)  # [T, 1, head_dim / 2]
        x = self._embedded(token_ids)
        for i, layer in enumerate(self._layers):
            qkv = F.linear(_rms_norm(x, layer.input_norm, c.rms_norm_eps), layer.qkv).view(len(x), -1, c.head_dim)
            qk = _rotate(qkv[:, : c.heads + c.kv_heads], cos, sin)
            kv = torch.cat((qk[:, c.heads :], qkv[:, c.heads + c.kv_heads :]), dim=1)
            x = x + F.linear(attention.attend(i, qk[:, : c.heads], kv), layer.out)
            gate, up = F.linear(_rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        known = (token_ids >= 0) & (token_ids < self.config.vocab_size)
        if bool(known.all()):
            return F.embedding(token_ids, self._embed)
        return F.embedding(token_ids * known, self._embed).masked_fill(~known[:, None], math.nan)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CausalLm.logits."""
        return F.linear(_rms_norm(hidden, self._norm, self.config.rms_norm_eps), self._head).float()


def load(folder: Path, raw_config: dict[str, Any], *, dtype: torch.dtype, context_length: int, progress: Callable[[int, str], None]) -> Llama:
    """Reads a Llama folder. Raises StartError(ModelInvalid)."""
    config = LlamaConfig.from_json(raw_config, folder / "config.json")
    with Weights(folder, dtype=dtype, progress=progress) as weights:
        return Llama(config, weights, context_length)


def _load_layer(weights: Weights, p: str) -> _Layer:
    return _Layer(
        input_norm=weights.take(f"{p}input_layernorm.weight"),
        qkv=weights.stack([f"{p}self_attn.{n}_proj.weight" for n in "qkv"]),
        out=weights.take(f"{p}self_attn.o_proj.weight"),
        post_norm=weights.take(f"{p}post_attention_layernorm.weight"),
        gate_up=weights.stack([f"{p}mlp.gate_proj.weight", f"{p}mlp.up_proj.weight"]),
        down=weights.take(f"{p}mlp.down_proj.weight"),
    )


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Zhang and Sennrich, "Root Mean Square Layer Normalization", in float32 whatever the dtype."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, head_dim]; number i is paired with number i + head_dim / 2. cos, sin: [T, 1, head_dim / 2] float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
