"""KV of a short context, all of it on the device: the cache of the levels below the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.attention.dense import DenseKeys, attend_dense
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.block_format import keys_values
from triforce_offload.kv.gather import Reader
from triforce_offload.kv.recent.drafted import Drafted
from triforce_offload.kv.recent.stores import NO_STORES, RecentStores
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.sizes import dense_bytes, dense_capacity
from triforce_offload.memory.device import DeviceMemory, put


class DenseKV:
    """Keys and values of `end` tokens, separate for each head, with room after them.

    A forward attends to all of them and to its own rows. It writes its rows after `end`, which
    moves when some of them are kept. `FixedDense` does so at constant addresses and shapes, as a
    recorded graph requires.

    rows: [layers, sides, kv_heads, capacity, head_dim]
    """

    def __init__(
        self,
        shape: KVShape,
        tokens: int,
        memory: DeviceMemory,
        purpose: str,
        recent: RecentStores = NO_STORES,
    ) -> None:
        """recent: the windows and states of the sequence. Raises DoesNotFitError."""
        self.end = 0
        self.recent = Drafted(recent)
        self.capacity = dense_capacity(tokens)
        self._memory = memory
        self._allocation = memory.allocate(dense_bytes(shape, tokens), purpose)
        # Zeros, since `FixedDense` also reads past the end, with a weight of zero.
        self.rows = self._allocation.bytes.zero_().view(shape.dtype)
        self.rows = self.rows.view(shape.layers, *shape.size(self.capacity))

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend."""
        keys = self.dense(layer, batch)
        return attend_dense(keys, qkv, batch.rotation, softmax, batch.visible)

    def dense(self, layer: int, batch: ForwardBatch, *, has_window: bool = False) -> DenseKeys:
        """Cache.dense."""
        if has_window:
            return self.recent.stores.windows.dense(layer, batch, self.recent.windows_end)
        if self.end + batch.end > self.capacity:
            raise RuntimeError(f"{self.end + batch.end} tokens in a cache of {self.capacity}")
        return self.dense_at(layer, self.end + batch.first)

    def dense_at(self, layer: int, start: int | torch.Tensor) -> DenseKeys:
        """Return the keys of a layer for rows that go to `start`, a number or [1] int64 on the
        device. The caller makes sure that there is room.
        """
        return DenseKeys(*keys_values(self.rows[layer]), start)

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window."""
        recent = self.recent
        return recent.stores.windows.attend(layer, qkv, batch, recent.windows_end, softmax)

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Cache.convolve."""
        recent = self.recent
        return recent.stores.states.convolve(layer, inputs, convolution, batch, recent.states_end)

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        return self.recent.stores.states.recur(layer, rows, batch, self.recent.states_end)

    def has_room(self, rows: int) -> bool:
        """Whether a forward may write `rows` rows after the end."""
        return self.recent.has_room(rows) and self.end + rows <= self.capacity

    def gather(self, moves: torch.Tensor, reader: Reader, chunk: int) -> None:
        """Copy chunks of `chunk` tokens to their slots, the first of which is at token 0.

        moves: as for `Reader.copy`

        Raises LinkError.
        """
        slots = moves.shape[2]
        in_chunks = self.rows[:, :, :, : slots * chunk].unflatten(3, (slots, chunk))
        reader.copy(moves, in_chunks)

    def write(self, start: int, keys_values: torch.Tensor) -> None:
        """Write tokens [layers, sides, kv_heads, n, head_dim] at `start`."""
        self.rows[:, :, :, start : start + keys_values.shape[3]] = keys_values

    def keep(self, rows: Sequence[int]) -> None:
        """Keep a path of the last rows. The caller makes sure that it is one: a recorded forward
        has no forward batch to check them against.
        """
        count = len(rows)
        if self.end + max(rows, default=-1) >= self.capacity:
            raise RuntimeError(f"keep of rows {list(rows)} behind {self.end} of {self.capacity}")
        if list(rows) != list(range(count)):
            kept = self.rows[:, :, :, self.end + put(list(rows), self.rows.device)]
            self.rows[:, :, :, self.end : self.end + count] = kept
        self.end += count
        self.recent.keep(rows)

    def close(self) -> None:
        self._memory.free(self._allocation)
        del self.rows
