"""KV of a short text, all of it on the device: what the levels below the target attend to."""

from __future__ import annotations

import torch
from triforce_kernels.streaming import attend_cache

from offload.kv.shape import KVShape
from offload.kv.sizes import dense_bytes, dense_capacity
from offload.kv.store import Room
from offload.memory.device import DeviceMemory


class DenseKV:
    """Keys and values of `end` tokens, one row a head, and room behind them.

    A forward attends to all of them and to itself causally; its own keys and values land behind
    `end`, which the owner moves when it keeps them. `fixed` does the same at addresses and shapes
    that never change, which is what a recorded graph needs.

    rows: [layers, 2, kv_heads, capacity, head_dim]
    """

    def __init__(self, shape: KVShape, tokens: int, memory: DeviceMemory, purpose: str) -> None:
        """Raises DoesNotFitError."""
        self.end = 0
        self.capacity = dense_capacity(tokens)
        self._memory = memory
        self._allocation = memory.allocate(dense_bytes(shape, tokens), purpose)
        # Zeros, since `fixed` reads what is behind the end too, with a weight of zero.
        self.rows = self._allocation.bytes.zero_().view(shape.dtype)
        self.rows = self.rows.view(shape.layers, 2, shape.kv_heads, self.capacity, shape.head_dim)

    def room(self, layer: int, tokens: int) -> Room:
        """model.Cache.room. Raises RuntimeError if there is none."""
        if self.end + tokens > self.capacity:
            raise RuntimeError(f"{self.end + tokens} tokens in a cache of {self.capacity}")
        return Room(*self.rows[layer], self.end)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """model.Cache.attend."""
        return _attend(query, self.rows[layer], self.end)

    def fixed(self, end: torch.Tensor) -> FixedDense:
        """The same for a forward behind `end`, [1] int64 on the device."""
        return FixedDense(self, end)

    def close(self) -> None:
        self._memory.free(self._allocation)
        del self.rows


class FixedDense:
    """One forward over a DenseKV whose end is known to the device alone: no address, shape or
    launch depends on it.
    """

    def __init__(self, kv: DenseKV, end: torch.Tensor) -> None:
        self._kv = kv
        self._end = end

    def room(self, layer: int, tokens: int) -> Room:
        """model.Cache.room; the caller has seen to it that there is some."""
        return Room(*self._kv.rows[layer], self._end)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """model.Cache.attend."""
        return _attend(query, self._kv.rows[layer], self._end)


def _attend(
    query: torch.Tensor, keys_values: torch.Tensor, end: int | torch.Tensor
) -> torch.Tensor:
    heads, tokens, head_dim = query.shape
    kv_heads = keys_values.shape[1]
    rows = query.reshape(kv_heads, heads // kv_heads * tokens, head_dim)
    return attend_cache(rows, *keys_values, tokens, end).view(heads, tokens, head_dim)
