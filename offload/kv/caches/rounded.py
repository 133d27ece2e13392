"""KV of a short context in 8 bits per number: half the bytes per step, or twice the tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from triforce_kernels.attention.dense import DenseKeys
from triforce_kernels.kv.rounding import round_chunks, rounded, scale_of
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.gather import Reader
from triforce_offload.kv.recent.stores import NO_STORES, RecentStores
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.sizes import layers_rounded_at_once, scale_bytes
from triforce_offload.memory.device import DeviceMemory

# Largest number that the scales represent before any was measured.
_UNKNOWN_PEAK = 8.0
# Scales reach beyond the measured peak by this factor, and further if only a few tokens were
# measured. After 1,000 tokens the target of SmolLM2-135M accepts .988 of the drafts without it,
# .996 with 1.1 to 1.25, .995 with 1.5 (tried by hand; current rates are in bench_rounded_kv.json).
_MARGIN = 1.2


class RoundedKV(DenseKV):
    """A DenseKV of integers from -127 to 127, times a scale for each channel of each head.

    Channels of keys differ in size far more than the tokens of one channel do (KIVI, Liu et al.,
    2024), so each channel has a scale. Keys and values are never multiplied by their scales: the
    query is multiplied before it attends to integers, and so is the result. Scales are measured
    when a context is first gathered, and again after `measure_again`. Larger numbers that come
    later are clipped, which is acceptable because this KV is only used for drafting.

    scale: [layers, sides, kv_heads, head_dim] float32
    """

    def __init__(
        self,
        shape: KVShape,
        tokens: int,
        memory: DeviceMemory,
        purpose: str,
        recent: RecentStores = NO_STORES,
    ) -> None:
        """shape: shape of the exact KV. Raises DoesNotFitError."""
        self._dtype = shape.dtype
        self._scales = memory.allocate(scale_bytes(shape), purpose)
        try:
            rounded_shape = replace(shape, dtype=torch.int8, split=False)
            super().__init__(rounded_shape, tokens, memory, purpose, recent)
        except BaseException:
            memory.free(self._scales)
            raise
        size = torch.Size((shape.layers, shape.sides, shape.kv_heads, shape.head_dim))
        self.scale = self._scales.bytes.view(torch.float32)[: size.numel()].view(size)
        self.scale.copy_(scale_of(torch.tensor(_UNKNOWN_PEAK)))
        self.measure_again(0)

    def measure_again(self, tokens: int) -> None:
        """Measure new scales at the next gather or write, which replaces everything.

        tokens: number of tokens of the context
        """
        self._measured = False
        self._reach = _MARGIN + max(1, tokens) ** -0.5

    def gather(self, moves: torch.Tensor, reader: Reader, chunk: int) -> None:
        """DenseKV.gather, through exact numbers, a few layers at a time."""
        layers, kv_heads, slots = moves.shape
        size = torch.Size((self.rows.shape[1], kv_heads, slots, chunk, self.rows.shape[4]))
        in_chunks = self.rows[:, :, :, : slots * chunk].unflatten(3, (slots, chunk))
        at_once = layers_rounded_at_once(layers, size.numel())
        room = torch.empty(at_once, *size, dtype=self._dtype, device=moves.device)
        for first in range(0, layers, at_once):
            some = slice(first, min(first + at_once, layers))
            exact = room[: some.stop - first]
            reader.copy(moves[some], exact, first)
            if not self._measured:
                # Slots that were not moved have undefined contents.
                anything = (moves[some] < 0)[:, None, :, :, None, None]
                self._measure(some, exact.masked_fill(anything, 0).flatten(3, 4))
            round_chunks(moves[some], exact, self.scale[some], in_chunks[some])
        self._measured = True

    def write(self, start: int, keys_values: torch.Tensor) -> None:
        """DenseKV.write."""
        if not self._measured and keys_values.shape[3]:
            self._measure(slice(None), keys_values)
            self._measured = True
        super().write(start, rounded(keys_values, self.scale.unsqueeze(3)))

    def dense_at(self, layer: int, start: int | torch.Tensor) -> DenseKeys:
        """DenseKV.dense_at."""
        return super().dense_at(layer, start)._replace(scale=self.scale[layer])

    def close(self) -> None:
        super().close()
        self._memory.free(self._scales)
        del self.scale

    def _measure(self, layers: slice, keys_values: torch.Tensor) -> None:
        """Measure scales on tokens [layers, sides, kv_heads, n, head_dim]."""
        peak = keys_values.abs().amax(3).float()
        self.scale[layers] = scale_of(peak * self._reach)
