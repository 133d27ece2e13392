"""Device memory for blocks of KV that stay there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.kv.shape import KVShape
from offload.memory.device import DeviceMemory


class DeviceBlocks:
    """Some blocks of each layer, those of one layer side by side, so that they are attended to in
    one call.

    counts: blocks of each layer
    """

    def __init__(
        self, shape: KVShape, counts: Sequence[int], memory: DeviceMemory, purpose: str
    ) -> None:
        """Raises DoesNotFitError."""
        self.counts = tuple(counts)
        self._shape = shape
        self._memory = memory
        self._first = [sum(self.counts[:layer]) for layer in range(len(self.counts))]
        self._allocation = memory.allocate(shape.block_bytes * sum(self.counts), purpose)

    def buffer(self, layer: int, index: int) -> torch.Tensor:
        """The layer's block `index` of these, flat uint8."""
        return self._bytes(layer, index, index + 1)

    def run(self, layer: int, count: int) -> torch.Tensor:
        """The layer's first `count` blocks, [2, count, kv_heads, block_tokens, head_dim]."""
        shape = self._shape
        flat = self._bytes(layer, 0, count).view(count, shape.block_bytes)
        exact = flat[:, : shape.token_bytes * shape.block_tokens]
        exact = exact.view(shape.dtype) if count else exact.new_empty(0, dtype=shape.dtype)
        size = (count, 2, shape.kv_heads, shape.block_tokens, shape.head_dim)
        return exact.view(size).transpose(0, 1)

    def close(self) -> None:
        self._memory.free(self._allocation)

    def _bytes(self, layer: int, first: int, end: int) -> torch.Tensor:
        size, start = self._shape.block_bytes, self._first[layer]
        return self._allocation.bytes[(start + first) * size : (start + end) * size]
