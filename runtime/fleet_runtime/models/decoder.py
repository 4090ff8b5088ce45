"""The one decoder-only model in plain torch: all families of `models.families`, as their ModelSpec says.

Called by the registry and by the torch executor. q, k, v are one projection and so are gate and up. Sources: see `families`; Zhang and
Sennrich, "Root Mean Square Layer Normalization"; Su et al., "RoFormer".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fleet_runtime.models.base import Attention, AttentionKind, KvShape
from fleet_runtime.models.spec import ModelSpec, Rope
from fleet_runtime.models.weights import WeightFiles, to_bf16, to_float32


@dataclass(frozen=True, slots=True)
class _Norm:
    """weight: in the model's dtype; with an offset: weight + offset in float32, for that is how such families multiply."""

    weight: torch.Tensor
    eps: float
    wide: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype) if self.wide else self.weight * normed.to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one block, and how it attends. What the model does not have is None."""

    kind: AttentionKind
    rope: int
    input_norm: _Norm
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: _Norm | None  # over head_dim
    k_norm: _Norm | None
    out: torch.Tensor  # [hidden, heads * head_dim]
    out_bias: torch.Tensor | None
    attention_post_norm: _Norm | None
    mlp_norm: _Norm
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None
    mlp_post_norm: _Norm | None


class Decoder:
    """A loaded model; see `CausalLm`. Owns its weights."""

    def __init__(self, spec: ModelSpec, weights: WeightFiles, *, dtype: torch.dtype, context_length: int) -> None:
        """Args: weights: of the spec, open; nothing of it is kept. context_length: positions that will be used."""
        self.spec = spec
        load = _Loader(spec, weights, dtype)
        self._embed = load.stacked(["embedding"])
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype)
        self._layers = [load.layer(i) for i in range(len(spec.layers))]
        self._norm = load.norm("final_norm")
        self._head = self._embed if spec.tied else load.stacked(["head"])
        self._ropes = [rope_table(rope, context_length) for rope in spec.ropes]

    @property
    def kv_shape(self) -> KvShape:
        """See CausalLm."""
        return KvShape(layers=len(self.spec.layers), kv_heads=self.spec.kv_heads, head_dim=self.spec.head_dim)

    @property
    def vocab_size(self) -> int:
        """See CausalLm."""
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        """See CausalLm."""
        return self.spec.hidden_size

    @property
    def max_context(self) -> int:
        """See CausalLm."""
        return self.spec.max_context

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """See CausalLm.forward."""
        angles = [(cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)) for cos, sin in self._ropes]  # each [T, 1, head_dim / 2]
        x = self._embedded(token_ids)
        for i, layer in enumerate(self._layers):
            branch = self._attention(i, layer, layer.input_norm(x), angles[layer.rope], attention)
            x = x + (layer.attention_post_norm(branch) if layer.attention_post_norm else branch)
            branch = self._mlp(layer, layer.mlp_norm(x))
            x = x + (layer.mlp_post_norm(branch) if layer.mlp_post_norm else branch)
        return x

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CausalLm.normed."""
        return self._norm(hidden)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See CausalLm.logits."""
        logits = F.linear(normed, self._head).float()
        return torch.tanh(logits / self.spec.logit_softcap) * self.spec.logit_softcap if self.spec.logit_softcap else logits

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        known = (token_ids >= 0) & (token_ids < self.spec.vocab_size)
        if bool(known.all()):
            x = F.embedding(token_ids, self._embed)
        else:
            x = F.embedding(token_ids * known, self._embed).masked_fill(~known[:, None], math.nan)
        return x if self.spec.embedding_scale == 1.0 else x * self._embedding_scale

    def _attention(self, i: int, layer: _Layer, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attention: Attention) -> torch.Tensor:
        heads, both = self.spec.heads, self.spec.heads + self.spec.kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.spec.head_dim)
        qk = qkv[:, :both]
        if layer.q_norm and layer.k_norm:
            qk = torch.cat((layer.q_norm(qkv[:, :heads]), layer.k_norm(qkv[:, heads:both])), dim=1)
        qk = _rotate(qk, *angles)
        kv = torch.cat((qk[:, heads:], qkv[:, both:]), dim=1)
        return F.linear(attention.attend(i, qk[:, :heads], kv, layer.kind), layer.out, layer.out_bias)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        gate = F.silu(gate) if self.spec.activation == "silu" else F.gelu(gate, approximate="tanh")
        return F.linear(gate * up, layer.down, layer.down_bias)


class _Loader:
    """Copies weights into tensors of the run's dtype."""

    def __init__(self, spec: ModelSpec, weights: WeightFiles, dtype: torch.dtype) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = dtype

    def layer(self, i: int) -> _Layer:
        spec, p = self._spec, f"{i}."
        return _Layer(
            kind=AttentionKind(scale=spec.attention_scale, window=spec.layers[i].window, softcap=spec.attention_softcap),
            rope=spec.layers[i].rope,
            input_norm=self.norm(f"{p}input_norm"),
            qkv=self.stacked([f"{p}{n}" for n in "qkv"]),
            qkv_bias=self.stacked([f"{p}{n}_bias" for n in "qkv"]) if spec.qkv_bias else None,
            q_norm=self.norm(f"{p}q_norm") if spec.qk_norm else None,
            k_norm=self.norm(f"{p}k_norm") if spec.qk_norm else None,
            out=self.stacked([f"{p}o"]),
            out_bias=self.stacked([f"{p}o_bias"]) if spec.o_bias else None,
            attention_post_norm=self.norm(f"{p}attention_post_norm") if spec.post_norms else None,
            mlp_norm=self.norm(f"{p}mlp_norm"),
            gate_up=self.stacked([f"{p}gate", f"{p}up"]),
            gate_up_bias=self.stacked([f"{p}gate_bias", f"{p}up_bias"]) if spec.mlp_bias else None,
            down=self.stacked([f"{p}down"]),
            down_bias=self.stacked([f"{p}down_bias"]) if spec.mlp_bias else None,
            mlp_post_norm=self.norm(f"{p}mlp_post_norm") if spec.post_norms else None,
        )

    def norm(self, name: str) -> _Norm:
        offset = self._spec.norm_offset
        weight = self.stacked([name], torch.float32) + offset if offset else self.stacked([name])
        return _Norm(weight, self._spec.norm_eps, wide=bool(offset))

    def stacked(self, names: Sequence[str], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Weights joined along their first dimension, in memory of their own."""
        shapes = [self._weights.shape_of(name) for name in names]
        out = torch.empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=dtype or self._dtype)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            self._copy(name, out[row : row + shape[0]])
            self._weights.release(name)
            row += shape[0]
        return out

    def _copy(self, name: str, out: torch.Tensor) -> None:
        array = self._weights.get(name)
        if out.dtype == torch.bfloat16:
            to_bf16(array, out.view(torch.uint16).numpy())
        elif out.dtype == torch.float32:
            to_float32(array, out.numpy())
        else:
            with np.errstate(over="ignore"):  # beyond float16: infinity, and the first step says so
                out.numpy()[...] = to_float32(array) if array.dtype == np.uint16 else array


def rope_table(rope: Rope, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position and frequency, each [length, head_dim / 2] float32."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), torch.from_numpy(rope.inv_freq))
    return angles.cos() * rope.factor, angles.sin() * rope.factor


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, head_dim]; number i is paired with number i + head_dim / 2. cos, sin: [T, 1, head_dim / 2] float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
