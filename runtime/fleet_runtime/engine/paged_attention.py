"""Attention of one step over paged KV, in plain torch: a plan made once per step from flat arrays, then one call per layer.

Rows of one token (decode) are grouped and computed together; each longer row (a chunk of a prompt) is computed alone. Every number
that is masked must still be finite (0 * NaN is NaN): a page is therefore cleared when its first token is written, and short page
tables are filled up with the row's own first page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.engine.base import I32, StepInput
from fleet_runtime.engine.kv_pool import KvPool
from fleet_runtime.models.base import AttentionKind

I64 = npt.NDArray[np.int64]
_CAPPED_ROWS: Final = 64  # queries of a chunk whose scores are written out at once, where they are


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are computed together: decode rows of like length, or one chunk.

    tokens: [N] indices into the step's tokens. blocks: [B, kv_heads, P], numbers of (page, layer 0, K, head) blocks of page_size x head_dim.
    last: [N] the position of each query, the last one that it sees. biases: by window, see `bias`.
    """

    is_decode: bool
    tokens: torch.Tensor
    blocks: torch.Tensor
    last: I64
    biases: dict[int, torch.Tensor] = field(default_factory=dict)

    def bias(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees a position, else -inf: decode [B, 1, 1, P * page_size], chunk [N, P * page_size]. window 0: all before it."""
        if (made := self.biases.get(window)) is None:
            positions, last = np.arange(self.blocks.shape[2] * PAGE_SIZE), self.last[:, None]
            seen = positions <= last
            if window:
                seen &= positions > last - window
            made = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), -math.inf)
            self.biases[window] = made = made[:, None, None, :] if self.is_decode else made
        return made


class StepAttention:
    """`models.base.Attention` of one step. Not thread-safe; dropped after the step."""

    def __init__(self, pool: KvPool, batch: StepInput) -> None:
        """Clears the pages that the step begins."""
        self._pool = pool
        layout = pool.layout
        self._kv_heads = layout.kv_heads
        self._block = pool.pages.view(-1, PAGE_SIZE * layout.head_dim)  # a block: the tokens of one head's K or V in one page and layer
        self._slot = pool.pages.view(-1, layout.head_dim)
        self._page_blocks = layout.layers * 2 * layout.kv_heads
        counts = np.diff(batch.row_starts)
        rows = np.repeat(np.arange(len(counts)), counts)
        pages = batch.page_tables[rows, batch.positions // PAGE_SIZE].astype(np.int64)
        if len(pages) and (pages.min() < 0 or pages.max() >= layout.num_pages):
            raise IndexError(f"a page table names pages {pages.min()}..{pages.max()} of {layout.num_pages}")
        slots = batch.positions % PAGE_SIZE
        pool.fill(pages[slots == 0].tolist(), 0.0)
        # [T, 2 * kv_heads]: where each new token's K and V of each head go in layer 0.
        heads = np.arange(2 * layout.kv_heads)
        self._targets = torch.from_numpy((pages[:, None] * self._page_blocks + heads) * PAGE_SIZE + slots[:, None])
        self._groups = [self._decode_group(batch, g) for g in decode_groups(batch.context_lens, counts)]
        self._groups += [self._chunk(batch, int(r)) for r in np.flatnonzero(counts > 1)]

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
        """See models.base.Attention.attend."""
        shift = layer * 2 * self._kv_heads
        self._slot.index_copy_(0, (self._targets + shift * PAGE_SIZE).view(-1), kv.reshape(-1, kv.shape[-1]))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            k_blocks = group.blocks + shift
            k, v = self._gather(k_blocks), self._gather(k_blocks + self._kv_heads)  # [B, kv_heads, S, head_dim]
            attend = _decode if group.is_decode else _chunk
            out[group.tokens] = attend(q[group.tokens], k, v, group.bias(kind.window, k.dtype), kind)
        return out.view(len(q), -1)

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        batch, heads, pages = blocks.shape
        return self._block.index_select(0, blocks.view(-1)).view(batch, heads, pages * PAGE_SIZE, -1)

    def _blocks(self, tables: I32) -> torch.Tensor:
        heads = np.arange(self._kv_heads)[None, :, None]
        return torch.from_numpy(tables.astype(np.int64)[:, None, :] * self._page_blocks + heads)

    def _decode_group(self, batch: StepInput, rows: I64) -> RowGroup:
        lengths = batch.context_lens[rows]
        needed = num_pages(lengths)
        width = int(needed.max())
        tables = batch.page_tables[rows, :width]
        tables = np.where(np.arange(width) < needed[:, None], tables, tables[:, :1])
        return RowGroup(
            is_decode=True,
            tokens=torch.from_numpy(batch.row_starts[rows].astype(np.int64)),
            blocks=self._blocks(tables),
            last=lengths.astype(np.int64) - 1,
        )

    def _chunk(self, batch: StepInput, row: int) -> RowGroup:
        start, end = int(batch.row_starts[row]), int(batch.row_starts[row + 1])
        width = int(num_pages(batch.context_lens[row]))
        return RowGroup(
            is_decode=False,
            tokens=torch.arange(start, end),
            blocks=self._blocks(batch.page_tables[row : row + 1, :width]),
            last=batch.positions[start:end].astype(np.int64),
        )


def num_pages(tokens: I32) -> I32:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


def decode_groups(context_lens: I32, counts: I32) -> list[I64]:
    """Row numbers of the one-token rows, in groups within which no row has over twice the pages of another (less is padding).

    Pure, and the same for the same lengths.
    """
    rows = np.flatnonzero(counts == 1)
    pages = num_pages(context_lens[rows])
    order = np.argsort(pages, kind="stable")
    groups: list[I64] = []
    start = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or pages[order[i]] > 2 * pages[order[start]]:
            groups.append(rows[order[start:i]])
            start = i
    return groups


def _decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    """q: [B, heads, D]; k, v: [B, kv_heads, S, D]. The query heads of one KV head are rows of one matrix product. Returns [B, heads, D]."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    scores = _capped((grouped @ k.transpose(2, 3)) * kind.scale, kind.softcap) + bias
    return (torch.softmax(scores, dim=-1) @ v).view(q.shape)


def _chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    """q: [N, heads, D]; k, v: [1, kv_heads, S, D]; bias: [N, S]. Returns [N, heads, D]."""
    if kind.softcap:
        starts = range(0, len(q), _CAPPED_ROWS)
        return torch.cat([_capped_chunk(q[i : i + _CAPPED_ROWS], k, v, bias[i : i + _CAPPED_ROWS], kind) for i in starts])
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=bias, enable_gqa=True, scale=kind.scale)
    return out[0].transpose(0, 1)


def _capped_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    """As `_chunk`; torch's attention has no soft cap, so the scores are written out."""
    rows, heads, dim = q.shape
    grouped = q.transpose(0, 1).reshape(k.shape[1], -1, rows, dim)  # [kv_heads, heads of it, N, D]
    scores = _capped((grouped @ k[0, :, None].transpose(2, 3)) * kind.scale, kind.softcap) + bias
    return (torch.softmax(scores, dim=-1) @ v[0, :, None]).reshape(heads, rows, dim).transpose(0, 1)


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(scores / cap) * cap if cap else scores
