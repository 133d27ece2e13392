"""Device memory for resident blocks of KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_offload.kv.shape import KVShape
from triforce_offload.memory.device import DeviceMemory


class DeviceBlocks:
    """Blocks of each layer. Those of one layer are adjacent, so that one call attends to them.

    counts: number of blocks of each layer
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
        """Return block `index` of a layer, counted among these blocks, flat uint8."""
        return self._bytes(layer, index, index + 1)

    def run(self, layer: int, count: int) -> torch.Tensor:
        """Return a layer's first `count` blocks, [count, bytes of a block] uint8."""
        return self._bytes(layer, 0, count).view(count, self._shape.block_bytes)

    def close(self) -> None:
        self._memory.free(self._allocation)

    def _bytes(self, layer: int, first: int, end: int) -> torch.Tensor:
        size, start = self._shape.block_bytes, self._first[layer]
        return self._allocation.bytes[(start + first) * size : (start + end) * size]
