"""What a model and its users agree on: the attention a model calls, the facts the KV pool needs, the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token leaves in the KV pool: layers x 2 x kv_heads x head_dim numbers."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How a layer attends. scale: of the scores. window: tokens it sees, itself included, 0: all. softcap: cap * tanh(x / cap), 0: none."""

    scale: float
    window: int = 0
    softcap: float = 0.0


class Attention(Protocol):
    """Attention over the paged context of one step's rows; made new for each step, called once per layer in order."""

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
        """Stores the new keys and values, returns the attention's output.

        q: [T, heads, head_dim], rotated. kv: [T, 2 * kv_heads, head_dim], rotated keys, then values. Returns [T, heads * head_dim].
        """
        ...


class CausalLm(Protocol):
    """A loaded model. Holds weights only; one step's state is in `Attention`."""

    @property
    def kv_shape(self) -> KvShape: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Longest context the model was made for, tokens."""
        ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """token_ids, positions: [T] int64. Returns the last layer's hidden states, [T, hidden].

        An id outside the vocabulary becomes NaN: its row fails, and whatever reads its keys and values.
        """
        ...

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden] of `forward`. Returns the final norm's output, [N, hidden]."""
        ...

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """normed: [N, hidden] of `normed`. Returns [N, vocab] float32."""
        ...
