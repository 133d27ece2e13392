"""KV of a short text, all of it on the device: what the levels below the target attend to."""

from __future__ import annotations

import torch
from triforce_kernels.attention import merge, partial_attention

from .attend import causal_mask
from .device import DeviceMemory
from .shape import KVShape
from .sizes import dense_bytes, dense_capacity


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

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """model.Cache.attend. Raises RuntimeError, before any write, if there is no room."""
        heads, tokens, head_dim = query.shape
        kv_heads = key.shape[0]
        start, end = self.end, self.end + tokens
        if end > self.capacity:
            raise RuntimeError(f"{end} tokens in a cache of {self.capacity}")
        keys, values = self.rows[layer]
        keys[:, start:end] = key
        values[:, start:end] = value
        rows = query.reshape(kv_heads, heads // kv_heads * tokens, head_dim)
        if tokens == 1:
            out = partial_attention(rows, keys[:, :end], values[:, :end]).out
            return out.view(heads, tokens, head_dim)
        mask = causal_mask(tokens, tokens, heads // kv_heads, query)
        parts = [
            partial_attention(rows, keys[:, start:end], values[:, start:end], mask=mask),
        ]
        if start:
            parts.insert(0, partial_attention(rows, keys[:, :start], values[:, :start]))
        return merge(parts).view(heads, tokens, head_dim)

    def fixed(self, end: torch.Tensor, tokens: int) -> FixedDense:
        """The same for a forward of exactly `tokens` tokens behind `end`, [1] int64."""
        return FixedDense(self, end, tokens)

    def close(self) -> None:
        self._memory.free(self._allocation)
        del self.rows


class FixedDense:
    """One forward over a DenseKV whose end is known to the device alone.

    Attends to the whole capacity under a mask, so no address and no shape depends on the end.
    """

    def __init__(self, kv: DenseKV, end: torch.Tensor, tokens: int) -> None:
        self._kv = kv
        self._slots = end + torch.arange(tokens, device=end.device)
        columns = torch.arange(kv.capacity, device=end.device)
        hidden = columns > self._slots.unsqueeze(1)
        self._mask = torch.zeros(hidden.shape, dtype=kv.rows.dtype, device=end.device).masked_fill_(
            hidden, float("-inf")
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """model.Cache.attend."""
        heads, tokens, head_dim = query.shape
        kv_heads = key.shape[0]
        keys, values = self._kv.rows[layer]
        keys.index_copy_(1, self._slots, key)
        values.index_copy_(1, self._slots, value)
        rows = query.reshape(kv_heads, heads // kv_heads * tokens, head_dim)
        mask = self._mask.repeat(heads // kv_heads, 1)
        return partial_attention(rows, keys, values, mask=mask).out.view(heads, tokens, head_dim)
