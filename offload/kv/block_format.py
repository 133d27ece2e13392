"""How a block's keys and values are written to its bytes, and read from them."""

from __future__ import annotations

from typing import Protocol

import torch
from triforce_kernels.kv_planes import KVPlanes, decode_block, decode_chunks, encode_block

from offload.kv.shape import KVShape
from offload.link.waiting import number

KeysValues = tuple[torch.Tensor, torch.Tensor]


class BlockFormat(Protocol):
    """Buffers are flat uint8, of `nbytes` bytes or more."""

    nbytes: int

    def write(self, buffer: torch.Tensor, keys_values: torch.Tensor) -> bool:
        """Writes [2, kv_heads, block_tokens, head_dim]. Returns whether it could: if not, the
        buffer holds nothing.
        """

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """[2, kv_heads, block_tokens, head_dim], valid until the next read."""

    def copy(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        """Reads into [2, kv_heads, block_tokens, head_dim]."""

    def chunks(
        self, buffer: torch.Tensor, heads: torch.Tensor, chunks: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Some chunks of `tokens` tokens, [2, n, tokens, head_dim], to draft with.

        heads, chunks: [n] int64, KV heads and chunks of the block
        """


class DenseBlocks:
    """The numbers as they are."""

    def __init__(self, shape: KVShape) -> None:
        self.nbytes = shape.dense_block_bytes
        self._shape = shape

    def write(self, buffer: torch.Tensor, keys_values: torch.Tensor) -> bool:
        self.read(buffer).copy_(keys_values)
        return True

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        exact = buffer[: shape.token_bytes * shape.block_tokens].view(shape.dtype)
        return exact.view(2, shape.kv_heads, shape.block_tokens, shape.head_dim)

    def copy(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(self.read(buffer))

    def chunks(
        self, buffer: torch.Tensor, heads: torch.Tensor, chunks: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        return as_chunks(self.read(buffer), tokens)[:, heads, chunks]


class PlaneBlocks:
    """The planes of bfloat16 numbers."""

    def __init__(self, shape: KVShape, scratch: torch.Tensor) -> None:
        """scratch: flat uint8, where blocks are decoded."""
        self.nbytes = shape.block_bytes
        self._layout = shape.planes
        self._decoded = DenseBlocks(shape).read(scratch)

    def write(self, buffer: torch.Tensor, keys_values: torch.Tensor) -> bool:
        return bool(number(encode_block(keys_values.flatten(0, 1), self._planes(buffer))))

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        decode_block(self._planes(buffer), self._decoded.flatten(0, 1))
        return self._decoded

    def copy(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        decode_block(self._planes(buffer), target.flatten(0, 1))

    def chunks(
        self, buffer: torch.Tensor, heads: torch.Tensor, chunks: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        return decode_chunks(self._planes(buffer), heads, chunks, tokens)

    def _planes(self, buffer: torch.Tensor) -> KVPlanes:
        at = self._layout
        heads, tokens, head_dim = at.rows, at.tokens, at.head_dim
        numbers = heads * tokens * head_dim
        return KVPlanes(
            buffer[at.upper : at.upper + numbers].view(heads, tokens, head_dim),
            buffer[at.lower : at.lower + numbers // 2].view(heads, tokens, head_dim // 2),
            buffer[at.base : at.base + heads * head_dim].view(heads, head_dim),
            buffer[at.places : at.places + 4 * at.room].view(torch.int32),
            buffer[at.patterns : at.patterns + 2 * at.room].view(torch.int16),
        )


def as_chunks(keys_values: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """[2, kv_heads, tokens, head_dim] as its whole chunks, [2, kv_heads, n, chunk, head_dim]."""
    whole = keys_values.shape[2] // chunk_tokens * chunk_tokens
    return keys_values[:, :, :whole].unflatten(2, (-1, chunk_tokens))
