"""KV of a short text in 8 bits a number: half the bytes a step, or twice the tokens in a cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from triforce_kernels.attention.streaming import attend_cache
from triforce_kernels.kv.rounding import round_chunks, rounded, scale_of
from triforce_kernels.layer import rope_into
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.gather import Reader
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.sizes import layers_rounded_at_once, scale_bytes
from triforce_offload.memory.device import DeviceMemory

# Before anything is known of a text its numbers are told apart up to this.
_UNKNOWN_PEAK = 8.0
# Scales reach so much farther than what they are measured by, and farther where that is few
# tokens. After 1,000 tokens SmolLM2-135M holds to .988 of what it drafts without, to .996 with 1.1
# to 1.25, to .995 with 1.5 (tried by hand; what it holds to now is in bench_rounded_kv.json).
_MARGIN = 1.2


class RoundedKV(DenseKV):
    """A DenseKV of whole numbers from -127 to 127, times a scale for each channel of each head.

    Channels of keys differ in size far more than the tokens of one channel do (KIVI, Liu et al.,
    2024), so scales are of channels. Keys and values are never multiplied by them: a query is,
    before it attends to whole numbers, and so is what comes of it. Scales are measured where a text
    is first gathered, and again after `measure_again`. What comes later and is larger is cut: all
    of this is to draft with.

    scale: [layers, 2, kv_heads, head_dim] float32
    """

    def __init__(self, shape: KVShape, tokens: int, memory: DeviceMemory, purpose: str) -> None:
        """shape: of the KV that it is made of. Raises DoesNotFitError."""
        self._dtype = shape.dtype
        self._scales = memory.allocate(scale_bytes(shape), purpose)
        try:
            super().__init__(replace(shape, dtype=torch.int8, split=False), tokens, memory, purpose)
        except BaseException:
            memory.free(self._scales)
            raise
        size = torch.Size((shape.layers, 2, shape.kv_heads, shape.head_dim))
        self.scale = self._scales.bytes.view(torch.float32)[: size.numel()].view(size)
        self.scale.copy_(scale_of(torch.tensor(_UNKNOWN_PEAK)))
        self.measure_again(0)

    def measure_again(self, tokens: int) -> None:
        """Everything is about to be gathered or written anew, by scales of its own.

        tokens: of the text
        """
        self._measured = False
        self._reach = _MARGIN + max(1, tokens) ** -0.5

    def gather(self, moves: torch.Tensor, reader: Reader, chunk: int) -> None:
        """DenseKV.gather, by way of the numbers themselves, a few layers at a time."""
        layers, kv_heads, slots = moves.shape
        size = torch.Size((2, kv_heads, slots, chunk, self.rows.shape[4]))
        in_chunks = self.rows[:, :, :, : slots * chunk].unflatten(3, (slots, chunk))
        at_once = layers_rounded_at_once(layers, size.numel())
        room = torch.empty(at_once, *size, dtype=self._dtype, device=moves.device)
        for first in range(0, layers, at_once):
            some = slice(first, min(first + at_once, layers))
            exact = room[: some.stop - first]
            reader.copy(moves[some], exact, first)
            if not self._measured:
                # What was not moved is anything.
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

    def attend_at(
        self, layer: int, qkv: torch.Tensor, start: int | torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """DenseKV.attend_at; the forward batch is no tree."""
        if batch.visible is not None:
            raise RuntimeError("a tree over KV in 8 bits")
        (keys, values), scale = self.rows[layer], self.scale[layer]
        query = rope_into(qkv, *batch.rotation, keys, values, start, scale)
        rows = query.reshape(keys.shape[0], -1, query.shape[2])
        out = attend_cache(rows, keys, values, batch.rows, start)
        return torch.mul(out, scale[1].unsqueeze(1), out=out).view(query.shape)

    def close(self) -> None:
        super().close()
        self._memory.free(self._scales)
        del self.scale

    def _measure(self, layers: slice, keys_values: torch.Tensor) -> None:
        """Takes scales from tokens [layers, 2, kv_heads, n, head_dim]."""
        peak = keys_values.abs().amax(3).float()
        self.scale[layers] = scale_of(peak * self._reach)
