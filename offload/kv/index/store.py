"""The index of keys of one sequence: always on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_kernels.attention.selection import Selection
from triforce_offload.kv.index.shape import IndexShape
from triforce_offload.kv.recent.marks import Mark
from triforce_offload.kv.recent.store import RecentStore
from triforce_offload.memory.device import DeviceMemory, put


class IndexStore(RecentStore):
    """The vectors of all tokens, in every layer whose tokens choose their keys, and those of whole
    blocks, which are computed once they are needed. The rows of a forward come behind the text's,
    in a prefill too, so a text can be cut to any length.

    vectors: [layers, capacity, dim]
    blocks: [layers, most blocks, dim]
    """

    shape: IndexShape

    def __init__(self, shape: IndexShape, max_pass_tokens: int, memory: DeviceMemory) -> None:
        """Raises DoesNotFitError."""
        capacity = shape.capacity(max_pass_tokens)
        super().__init__(capacity, past=0)
        self.shape = shape
        self._memory = memory
        self._allocation = memory.allocate(shape.device_bytes(max_pass_tokens), "index of keys")
        numbers = self._allocation.bytes.view(shape.dtype)
        tokens = torch.Size((shape.layers, capacity, shape.dim))
        blocks = torch.Size((shape.layers, shape.text_tokens // shape.block, shape.dim))
        self.vectors = numbers[: tokens.numel()].view(tokens)
        self.blocks = numbers[tokens.numel() :][: blocks.numel()].view(blocks)
        # How many blocks of each layer are computed.
        self._computed = [0] * shape.layers

    def write(self, layer: int, vectors: torch.Tensor, first: int) -> torch.Tensor:
        """Write the vectors of rows [rows, dim] behind the text, of which the first is row `first`
        of its forward. Return all vectors up to theirs. Raises RuntimeError if there is no room.
        """
        begin = self.length + first
        end = begin + len(vectors)
        self.check_room(end)
        self.vectors[layer, begin:end] = vectors
        return self.vectors[layer, :end]

    def blocks_of(self, layer: int, tokens: int, selection: Selection) -> torch.Tensor:
        """Return the vectors of the whole blocks of the first `tokens` tokens, [blocks, dim], which
        the text must have, or a prompt that becomes the text as it is.
        """
        size, count, known = self.shape.block, tokens // self.shape.block, self._computed[layer]
        if known < count:
            missing = self.vectors[layer, known * size : count * size]
            self.blocks[layer, known:count] = selection.blocks_of(missing, known)
            self._computed[layer] = count
        return self.blocks[layer, :count]

    def move(self, end: int, rows: Sequence[int]) -> None:
        """RecentStore.move."""
        count = len(rows)
        if list(rows) != list(range(count)):
            kept = self.vectors[:, end + put(list(rows), self.vectors.device)]
            self.vectors[:, end : end + count] = kept

    def roll_back(self, tokens: int) -> None:
        """RecentStore.roll_back. Blocks of a prompt that was not finished are forgotten too."""
        super().roll_back(tokens)
        self._forget_blocks()

    def mark_at(self, length: int) -> Mark:
        """RecentStore.mark_at."""
        return Mark(length, 0, (self.vectors[:, :length].to("cpu", copy=True),))

    def take(self, mark: Mark) -> None:
        """RecentStore.take."""
        (vectors,) = mark.parts
        self.vectors[:, : mark.length] = vectors.to(self.vectors.device)
        self.commit_fill(mark.length, mark.length)
        self._computed = [0] * self.shape.layers

    def close(self) -> None:
        """RecentStore.close."""
        self._memory.free(self._allocation)
        del self.vectors, self.blocks

    def _forget_blocks(self) -> None:
        most = self.length // self.shape.block
        self._computed = [min(count, most) for count in self._computed]

    def _empty(self) -> None:
        super()._empty()
        self._forget_blocks()

    def _surplus(self) -> int:
        return 0

    def _drop(self, layer: int, rows: int) -> None:
        """RecentStore._drop: nothing leaves."""
