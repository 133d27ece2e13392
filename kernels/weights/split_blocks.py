"""Matrices in blocks, each split into a block of fewer bits, which can be computed with alone, and
low bits: the interface of all types, and exact products.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from triforce_kernels import limits
from triforce_kernels.dispatch import TRITON, backend
from triforce_kernels.weights.block_types import HIGH_TYPES, BlockType
from triforce_kernels.weights.blocks import BlockWeight, block_matmul, has_kernel
from triforce_kernels.weights.stored import SplitWeight


@dataclass(frozen=True)
class SplitBlocksWeight(SplitWeight):
    """A matrix [rows, columns] of whole blocks, which are joined again bit for bit.

    data: [rows, bytes of a row] uint8, blocks of the high bits
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    data: torch.Tensor

    @property
    @abstractmethod
    def block_type(self) -> BlockType: ...

    @property
    def high_type(self) -> BlockType:
        """The type of the blocks of high bits."""
        return HIGH_TYPES[self.block_type.name]

    @abstractmethod
    def join(self) -> torch.Tensor:
        """Return the blocks: [rows, bytes of a row] uint8. Raise ValueError."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.data.shape
        return rows, row_bytes // self.high_type.nbytes * self.high_type.elements

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def rows_at_once(self) -> int:
        """Number of rows that are joined at a time."""
        by_gpu = self.device.type == "cuda" and backend(self.device) == TRITON
        numbers = limits.JOINED_AT_ONCE_ON_GPU if by_gpu else limits.JOINED_AT_ONCE
        return max(1, numbers // self.shape[1])

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        for first, part in self.blocks():
            for further, rows in part.dense_rows(dtype):
                yield first + further, rows

    def small_batch_matmul(
        self,
    ) -> Callable[[torch.Tensor, SplitBlocksWeight], torch.Tensor] | None:
        """StoredWeight.small_batch_matmul."""
        return split_matmul if has_kernel(self.block_type, self.device) else None

    def joined(self) -> torch.Tensor:
        """SplitWeight.joined."""
        return torch.cat([rows for _, rows in self.dense_rows(self.dtype)])

    def high(self) -> BlockWeight:
        """Return the matrix of the high bits."""
        return BlockWeight(self.data, self.high_type, self.shape[1])

    def blocks(self) -> Iterator[tuple[int, BlockWeight]]:
        """Yield the matrix in its blocks, some rows at a time, each time with the index of the
        first.
        """
        for first, part in self.parts(self.rows_at_once):
            yield first, BlockWeight(part.join(), self.block_type, self.shape[1])


def split_matmul(x: torch.Tensor, weight: SplitBlocksWeight) -> torch.Tensor:
    """Multiply x [rows, in] by the transposed weight: [rows, out] in x's dtype, by the blocks of
    some of its rows at a time (`blocks.block_matmul`). Raises ValueError.
    """
    if weight.shape[0] <= weight.rows_at_once:
        return block_matmul(x, BlockWeight(weight.join(), weight.block_type, weight.shape[1]))
    out = x.new_empty(x.shape[0], weight.shape[0])
    for first, part in weight.blocks():
        out[:, first : first + part.shape[0]] = block_matmul(x, part)
    return out
