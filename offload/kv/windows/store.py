"""The KV of one sequence in the layers that have a window: always on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.attention.dense import DenseKeys, attend_dense
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.recent.marks import Mark
from triforce_offload.kv.recent.store import RecentStore
from triforce_offload.kv.windows.shape import WindowShape
from triforce_offload.memory.device import DeviceMemory, put


class WindowStore(RecentStore):
    """The KV of the last tokens, dense, for every layer with a window.

    rows: [layers, 2, kv_heads, capacity, head_dim]
    """

    def __init__(self, shape: WindowShape, max_pass_tokens: int, memory: DeviceMemory) -> None:
        """Raises DoesNotFitError."""
        capacity = shape.capacity(max_pass_tokens)
        super().__init__(capacity, shape.past)
        self.shape = shape
        self._memory = memory
        self._allocation = memory.allocate(shape.device_bytes(max_pass_tokens), "windows")
        # Zeros, since a forward with a fixed shape also reads past the end, with a weight of zero.
        numbers = self._allocation.bytes.zero_().view(shape.dtype)
        size = torch.Size(shape.rows_shape(capacity))
        self.rows = numbers[: size.numel()].view(size)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        end: int | torch.Tensor,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window.

        end: index of the row of the whole batch's first token, a number or [1] int64 on the device
        Raises RuntimeError if there is no room.
        """
        keys = self.dense(layer, batch, end)
        return attend_dense(keys, qkv, batch.rotation, softmax, batch.visible)

    def dense(self, layer: int, batch: ForwardBatch, end: int | torch.Tensor) -> DenseKeys:
        """Cache.dense. end: as for `attend`. Raises RuntimeError if there is no room."""
        if not isinstance(end, torch.Tensor):
            self.check_room(end + batch.end)
            end += batch.first
        keys, values = self.rows[layer]
        return DenseKeys(keys, values, end, self.start, self.shape.window)

    def move(self, end: int, rows: Sequence[int]) -> None:
        """RecentStore.move."""
        count = len(rows)
        if list(rows) != list(range(count)):
            kept = self.rows[:, :, :, end + put(list(rows), self.rows.device)]
            self.rows[:, :, :, end : end + count] = kept

    def fill(self, layer: int, keys_values: torch.Tensor) -> None:
        """Store the last tokens of a layer, [2, kv_heads, tokens, head_dim], between `begin_fill`
        and `commit_fill`.
        """
        self.rows[layer, :, :, : keys_values.shape[2]] = keys_values

    def mark_at(self, length: int) -> Mark:
        """RecentStore.mark_at. The device makes a copy of one layer at a time."""
        most = self.shape.kept_tokens if length == self.length else self.shape.held
        end = length - self.start
        first = max(0, end - most)
        rows = torch.empty(self.shape.rows_shape(end - first), dtype=self.shape.dtype)
        for to, layer in zip(rows, self.rows, strict=True):
            to.copy_(layer[:, :, first:end])
        return Mark(length, self.start + first, (rows,))

    def take(self, mark: Mark) -> None:
        """RecentStore.take."""
        (rows,) = mark.parts
        held = rows.shape[3]
        for layer, own in zip(self.rows, rows, strict=True):
            layer[:, :, :held] = own.to(layer.device)
        self.commit_fill(mark.length, held)

    def close(self) -> None:
        """RecentStore.close."""
        self._memory.free(self._allocation)
        self.marks.replace([])
        del self.rows

    def _surplus(self) -> int:
        shape = self.shape
        return self.end - shape.held if self.end > shape.kept_tokens else 0

    def _drop(self, layer: int, rows: int) -> None:
        own = self.rows[layer]
        # Cloned, because the two ranges may overlap.
        own[:, :, : self.end - rows] = own[:, :, rows : self.end].clone()
