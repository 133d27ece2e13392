"""How a block's keys and values are written to its bytes, and read from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from triforce_kernels.kv.split_kv import SplitKV, decode_blocks, decode_chunks, encode_block
from triforce_offload.kv.shape import KVShape
from triforce_offload.link.waiting import number

KeysValues = tuple[torch.Tensor, torch.Tensor]


def keys_values(sides: torch.Tensor, dim: int = 0) -> KeysValues:
    """Return keys and values of a tensor that has them as its sides. Of one side, they are the same
    tensor.
    """
    keys = sides.select(dim, 0)
    return keys, keys if sides.shape[dim] == 1 else sides.select(dim, 1)


class BlockFormat(Protocol):
    """How blocks are stored. Buffers are flat uint8, of `nbytes` bytes or more."""

    nbytes: int

    def write(self, buffer: torch.Tensor, keys_values: torch.Tensor) -> bool:
        """Write [sides, kv_heads, block_tokens, head_dim]. Return whether the block fits; if it
        does not, the buffer's contents are invalid.
        """

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return [sides, kv_heads, block_tokens, head_dim], valid until the next read."""

    def runs(self, blocks: torch.Tensor) -> Iterator[KeysValues]:
        """Yield keys and values of adjacent blocks, [n, kv_heads, block_tokens, head_dim] each, as
        many blocks at a time as can be read at once. Each pair is valid until the next one.

        blocks: [blocks, bytes of one] uint8
        """

    def copy(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        """Read a block into [sides, kv_heads, block_tokens, head_dim]."""

    def chunks(
        self, buffer: torch.Tensor, heads: torch.Tensor, chunks: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Return chunks of `tokens` tokens, [sides, n, tokens, head_dim], for drafting.

        heads, chunks: [n] int64, indices of KV heads and of chunks in the block
        """


class DenseBlocks:
    """Blocks of plain numbers."""

    def __init__(self, shape: KVShape) -> None:
        self.nbytes = shape.dense_block_bytes
        self._shape = shape

    def write(self, buffer: torch.Tensor, keys_values: torch.Tensor) -> bool:
        self.read(buffer).copy_(keys_values)
        return True

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        exact = buffer[: shape.token_bytes * shape.block_tokens].view(shape.dtype)
        return exact.view(shape.size(shape.block_tokens))

    def runs(self, blocks: torch.Tensor) -> Iterator[KeysValues]:
        yield keys_values(_as_blocks(blocks, self._shape), 1)

    def copy(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(self.read(buffer))

    def chunks(
        self, buffer: torch.Tensor, heads: torch.Tensor, chunks: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        return as_chunks(self.read(buffer), tokens)[:, heads, chunks]


class SplitBlocks:
    """Blocks of split bfloat16 numbers."""

    def __init__(self, shape: KVShape, scratch: torch.Tensor) -> None:
        """scratch: flat uint8 buffer in which as many blocks are decoded at a time as fit."""
        self.nbytes = shape.block_bytes
        self._layout = shape.parts
        self._sides = shape.sides
        room = scratch[: scratch.numel() // shape.dense_block_bytes * shape.dense_block_bytes]
        self._decoded = _as_blocks(room.view(-1, shape.dense_block_bytes), shape)
        self._flat = self._decoded.flatten(1, 2)

    def write(self, buffer: torch.Tensor, keys_values: torch.Tensor) -> bool:
        split = SplitKV.of(buffer, self._layout)
        return bool(number(encode_block(keys_values.flatten(0, 1), split)))

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        decode_blocks(buffer.unsqueeze(0), self._layout, self._flat[:1])
        return self._decoded[0]

    def runs(self, blocks: torch.Tensor) -> Iterator[KeysValues]:
        for some in blocks.split(len(self._flat)):
            decode_blocks(some, self._layout, self._flat[: len(some)])
            yield keys_values(self._decoded[: len(some)], 1)

    def copy(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        decode_blocks(buffer.unsqueeze(0), self._layout, target.flatten(0, 1).unsqueeze(0))

    def chunks(
        self, buffer: torch.Tensor, heads: torch.Tensor, chunks: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        return decode_chunks(SplitKV.of(buffer, self._layout), heads, chunks, tokens, self._sides)


def _as_blocks(blocks: torch.Tensor, shape: KVShape) -> torch.Tensor:
    """View adjacent dense blocks, [blocks, bytes of one] uint8, as [blocks, sides,
    kv_heads, block_tokens, head_dim].
    """
    exact = blocks[:, : shape.token_bytes * shape.block_tokens].view(shape.dtype)
    return exact.view(-1, *shape.size(shape.block_tokens))


def as_chunks(keys_values: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """View the whole chunks of a tensor.

    keys_values: [sides, kv_heads, tokens, head_dim]

    Returns [sides, kv_heads, n, chunk_tokens, head_dim].
    """
    whole = keys_values.shape[2] // chunk_tokens * chunk_tokens
    return keys_values[:, :, :whole].unflatten(2, (-1, chunk_tokens))
