"""The KV pages of one executor: one tensor in which a page is one contiguous block over all layers.

Layout "layer-kv-head-token-dim" of a page: [layers][K, V][kv_heads][page_size][head_dim]. Owned by the executor; an I/O thread may copy pages
in and out while a step runs on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.engine.base import KvLayout
from fleet_runtime.models.base import KvShape

LAYOUT: Final = "layer-kv-head-token-dim"


def page_bytes(shape: KvShape, dtype: torch.dtype) -> int:
    """Size of one page over all layers, K and V."""
    return shape.layers * 2 * shape.kv_heads * PAGE_SIZE * shape.head_dim * dtype.itemsize


class KvPool:
    """pages: [num_pages, layers, 2, kv_heads, page_size, head_dim]. Its memory is reserved at once and used as pages are written."""

    def __init__(self, shape: KvShape, num_pages: int, dtype: torch.dtype) -> None:
        """Raises RuntimeError when the memory cannot be reserved."""
        self.pages = torch.empty((num_pages, shape.layers, 2, shape.kv_heads, PAGE_SIZE, shape.head_dim), dtype=dtype)
        self._bytes = self.pages.view(num_pages, -1).view(torch.uint8).numpy()  # the same memory, [num_pages, page_bytes]
        self.layout = KvLayout(
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            page_bytes=page_bytes(shape, dtype),
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            layout=LAYOUT,
        )

    def read(self, page: int) -> bytes:
        """A copy of one page."""
        return bytes(self._bytes[self._checked(page)].data)

    def write(self, page: int, data: bytes | memoryview) -> None:
        """Overwrites one page. Raises ValueError when `data` is not one page long; the page is then as before."""
        view = memoryview(data).cast("B")
        if len(view) != self.layout.page_bytes:
            raise ValueError(f"page {page}: got {len(view)} bytes, a page has {self.layout.page_bytes}")
        memoryview(self._bytes[self._checked(page)])[:] = view

    def fill(self, pages: Sequence[int], value: float) -> None:
        """Sets all numbers of the pages."""
        for page in pages:
            self.pages[self._checked(page)] = value

    def _checked(self, page: int) -> int:
        if not 0 <= page < self.layout.num_pages:
            raise IndexError(f"page {page} of {self.layout.num_pages}")
        return page
