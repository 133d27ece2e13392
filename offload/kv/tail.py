"""The hot tail: the newest KV of each layer on the device, followed by the rows of a pass."""

from __future__ import annotations

from collections.abc import Sequence

from triforce_offload.kv.block_format import KeysValues, keys_values
from triforce_offload.kv.shape import KVShape
from triforce_offload.memory.device import DeviceMemory, put


class HotTail:
    """Room for the newest tokens of a sequence. The owner of the sequence knows how many of them
    are kept.

    rows: [layers, sides, kv_heads, capacity, head_dim]
    rooms: keys and values of each layer, as views of `rows`
    """

    def __init__(self, shape: KVShape, max_pass_tokens: int, memory: DeviceMemory) -> None:
        """Raises DoesNotFitError."""
        self._memory = memory
        self._allocation = memory.allocate(shape.tail_bytes(max_pass_tokens), "KV tail")
        size = shape.layers, *shape.size(shape.tail_tokens(max_pass_tokens))
        # Zeros, since a forward with a fixed shape also reads past the end, with a weight of zero.
        self.rows = self._allocation.bytes.zero_().view(shape.dtype).view(size)
        # Created once, because each layer of each pass uses them.
        self.rooms: list[KeysValues] = [keys_values(layer) for layer in self.rows]

    @property
    def capacity(self) -> int:
        """Number of tokens that a layer has room for."""
        return self.rows.shape[3]

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Move `rows`, counted from `start`, in this order to `start` and the places after it."""
        count = len(rows)
        if list(rows) != list(range(count)):
            kept = self.rows[:, :, :, start + put(list(rows), self.rows.device)]
            self.rows[:, :, :, start : start + count] = kept

    def shift(self, layer: int, tokens: int, rest: int) -> None:
        """Drop a layer's first `tokens` tokens and move the other `rest` tokens to the front."""
        tail = self.rows[layer]
        # Cloned, because the two ranges may overlap.
        tail[:, :, :rest] = tail[:, :, tokens : tokens + rest].clone()

    def close(self) -> None:
        """Free the memory."""
        self._memory.free(self._allocation)
        del self.rows, self.rooms
