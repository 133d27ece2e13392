"""Matrices in GGUF's blocks of 5 or 6 bits per number, bit for bit, of which the scales and the
high 4 bits are blocks that can be computed with alone (`high_quants`).

The low bits of a block take 64 bytes (Q6_K, 2 bits of each number) or 32 (Q5_K, 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.block_types import BLOCK_TYPES, HIGH_QUANTS, BlockType
from triforce_kernels.weights.high_quants import LAYOUTS
from triforce_kernels.weights.split_blocks import SplitBlocksWeight

# Numbers that are split at a time: the temporaries stay in a processor's cache.
_SPLIT_AT_ONCE = 1 << 17
# Bytes of the low bits of a block.
LOW_BYTES = {name: BLOCK_TYPES[name].nbytes - high.nbytes for name, high in HIGH_QUANTS.items()}


@dataclass(frozen=True)
class SplitQuantsWeight(SplitBlocksWeight):
    """A matrix [rows, columns] of whole blocks of a type in HIGH_QUANTS.

    data: [rows, bytes of a row] uint8, blocks of the high bits
    low: [rows, bytes of the low bits of a row] uint8
    kind: the type of the blocks
    """

    low: torch.Tensor
    kind: BlockType

    @property
    def block_type(self) -> BlockType:
        return self.kind

    def rows(self, first: int, end: int) -> SplitQuantsWeight:
        """StoredWeight.rows."""
        return replace(self, data=self.data[first:end], low=self.low[first:end])

    def write(self, matrix: torch.Tensor) -> None:
        """SplitWeight.write."""
        rows, columns = self.shape
        right = matrix.shape == (rows, self.kind.row_bytes(columns)) and matrix.dtype == torch.uint8
        require("split_quants", right, blocks=matrix, data=self.data)
        run = implementation("split_quants", matrix.device)
        step = max(1, _SPLIT_AT_ONCE // columns)
        for first in range(0, rows, step):
            parts = run(matrix[first : first + step].contiguous(), self.kind)
            self.data[first : first + step] = parts.data
            self.low[first : first + step] = parts.low

    def join(self) -> torch.Tensor:
        """SplitBlocksWeight.join."""
        rows, columns = self.shape
        count = columns // self.kind.elements
        require(
            "join_quants",
            self.data.shape == (rows, count * self.high_type.nbytes)
            and self.low.shape == (rows, count * LOW_BYTES[self.kind.name])
            and all(
                part.dtype == torch.uint8 and part.is_contiguous() and part.device == self.device
                for part in (self.data, self.low)
            ),
            data=self.data,
            low=self.low,
            kind=self.kind,
        )
        return implementation("join_quants", self.device)(self.data, self.low, self.kind)


class Parts(NamedTuple):
    """Some rows that are split, as in SplitQuantsWeight."""

    data: torch.Tensor
    low: torch.Tensor


def reference_split(blocks: torch.Tensor, kind: BlockType) -> Parts:
    """Split blocks of a type, [rows, bytes of a row] uint8."""
    layout = LAYOUTS[kind.name]
    scales, integers = layout.unpacked(blocks.reshape(-1, kind.nbytes))
    high = layout.in_order(scales, layout.fours(integers >> layout.bits))
    low = layout.together(integers & (1 << layout.bits) - 1)
    return Parts(high.reshape(len(blocks), -1), low.reshape(len(blocks), -1))


def reference_join(data: torch.Tensor, low: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Return the blocks that were split: [rows, bytes of a row] uint8."""
    layout = LAYOUTS[kind.name]
    high_bytes = HIGH_QUANTS[kind.name].nbytes
    scales, high = layout.of_high(data.reshape(-1, high_bytes))
    fine = layout.apart(low.reshape(-1, LOW_BYTES[kind.name]))
    blocks = layout.packed(scales, high << layout.bits | fine)
    return blocks.reshape(len(data), data.shape[1] // high_bytes * kind.nbytes)
