"""Formats of matrices whose numbers are split into high bits, which can be computed with alone, and
low bits, which may be elsewhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from triforce_kernels import limits
from triforce_kernels.weights.block_types import F8_E4M3, HIGH_QUANTS, HIGH_TYPES, BlockType
from triforce_offload.weights.formats import Blocks, Format, Matrix, Read, Stack, aligned

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.blocks import BlockWeight
    from triforce_kernels.weights.high_bits import HighBitsWeight
    from triforce_kernels.weights.split_bf16 import SplitBF16Weight
    from triforce_kernels.weights.split_blocks import SplitBlocksWeight
    from triforce_kernels.weights.split_experts import SplitExpertsWeight
    from triforce_kernels.weights.split_fp8 import SplitFP8Weight
    from triforce_kernels.weights.split_quants import SplitQuantsWeight


@dataclass(frozen=True)
class SplitBF16(Matrix):
    """A bfloat16 matrix with an even number of columns, in 12 bits per number and room for
    exceptions (`triforce_kernels.weights.split_bf16`). Its high bits can be computed with alone;
    its low bits may be elsewhere.
    """

    read: ClassVar[Read] = Read.SPLIT_BF16
    draft_read: ClassVar[Read] = Read.HIGH
    split: ClassVar[bool] = True
    multiplies_experts: ClassVar[bool] = True

    @property
    def nbytes(self) -> int:
        return self.high_bytes + self.low_bytes

    @property
    def draft_bytes(self) -> int:
        return self.rows * self.columns

    @property
    def high_bytes(self) -> int:
        """Size without the low bits."""
        return sum(map(aligned, self._high_sizes))

    @property
    def low_bytes(self) -> int:
        """Size of the low bits, which only passes read."""
        return aligned(self.rows * self.columns // 2)

    def view(self, buffer: torch.Tensor) -> SplitBF16Weight:
        return self.joined(buffer[: self.high_bytes], buffer[self.high_bytes :])

    def joined(self, high: torch.Tensor, low: torch.Tensor) -> SplitBF16Weight:
        import torch

        from triforce_kernels.weights.split_bf16 import SplitBF16Weight

        numbers, base, places, patterns, starts = self._high_parts(high)
        return SplitBF16Weight(
            numbers.view(self.rows, -1),
            base,
            low[: self.rows * self.columns // 2].view(self.rows, -1),
            places.view(torch.int32),
            patterns.view(torch.int16),
            starts.view(torch.int32),
        )

    def high(self, buffer: torch.Tensor) -> HighBitsWeight:
        from triforce_kernels.weights.high_bits import HighBitsWeight

        high, base, *_ = self._high_parts(buffer)
        return HighBitsWeight(high.view(self.rows, -1), base)

    def _high_parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        parts, start = [], 0
        for size in self._high_sizes:
            parts.append(buffer[start : start + size])
            start += aligned(size)
        return parts

    @property
    def _high_sizes(self) -> tuple[int, ...]:
        """Bytes of the high bits, the base exponents, the exceptions' places, their patterns, and
        the index of the first exception of each group of rows.
        """
        numbers = self.rows * self.columns
        room = -(-numbers // limits.NUMBERS_OF_AN_EXCEPTION) + limits.LEAST_EXCEPTIONS
        starts = -(-self.rows // limits.ROWS_OF_A_START) + 1
        return numbers, self.rows, 4 * room, 2 * room, 4 * starts


@dataclass(frozen=True)
class SplitBlockMatrix(Matrix):
    """A matrix in blocks, bit for bit, of which each is split into a block of fewer bits, which can
    be computed with alone, and low bits, which may be elsewhere
    (`triforce_kernels.weights.split_blocks`).
    """

    read: ClassVar[Read] = Read.SPLIT_BLOCKS
    draft_read: ClassVar[Read] = Read.BLOCKS
    split: ClassVar[bool] = True

    @property
    @abstractmethod
    def block_type(self) -> BlockType: ...

    @property
    def high_type(self) -> BlockType:
        """The type of the blocks of high bits."""
        return HIGH_TYPES[self.block_type.name]

    @property
    def nbytes(self) -> int:
        return self.high_bytes + self.low_bytes

    @property
    def draft_bytes(self) -> int:
        return self.rows * self.high_type.row_bytes(self.columns)

    @property
    def high_bytes(self) -> int:
        return aligned(self.draft_bytes)

    @abstractmethod
    def joined(self, high: torch.Tensor, low: torch.Tensor) -> SplitBlocksWeight: ...

    def view(self, buffer: torch.Tensor) -> SplitBlocksWeight:
        return self.joined(buffer[: self.high_bytes], buffer[self.high_bytes :])

    def high(self, buffer: torch.Tensor) -> BlockWeight:
        from triforce_kernels.weights.blocks import BlockWeight

        data = buffer[: self.draft_bytes].view(self.rows, -1)
        return BlockWeight(data, self.high_type, self.columns)


@dataclass(frozen=True)
class SplitFP8(SplitBlockMatrix):
    """A matrix in blocks of F8_E4M3, in 8.2 bits per number. 5.25 of them are blocks of F8_HIGH
    (`triforce_kernels.weights.split_fp8`).
    """

    @property
    def block_type(self) -> BlockType:
        return F8_E4M3

    @property
    def low_bytes(self) -> int:
        return sum(map(aligned, self._low_sizes))

    def joined(self, high: torch.Tensor, low: torch.Tensor) -> SplitFP8Weight:
        import torch

        from triforce_kernels.weights.split_fp8 import SplitFP8Weight

        parts, start = [], 0
        for size in self._low_sizes:
            parts.append(low[start : start + size])
            start += aligned(size)
        bits, bases, starts = parts
        bases, starts = bases.view(self.rows, -1), starts.view(torch.int32)
        return SplitFP8Weight(self.high(high).data, bases, bits, starts)

    @property
    def _low_sizes(self) -> tuple[int, ...]:
        """Bytes of the low bits, of the bases of blocks, and of where each row begins."""
        numbers, (part, whole) = self.rows * self.columns, limits.LOW_BYTES_OF_FP8
        room = -(-numbers * part // whole) + self.rows
        return room, numbers // F8_E4M3.elements, 4 * (self.rows + 1)


@dataclass(frozen=True)
class SplitQuants(SplitBlockMatrix):
    """A matrix in blocks of Q6_K or Q5_K, in as many bits. 4.5 of them, or a few more, are
    blocks of high bits (`triforce_kernels.weights.split_quants`).
    """

    kind: BlockType

    @property
    def block_type(self) -> BlockType:
        return self.kind

    @property
    def low_bytes(self) -> int:
        return aligned(self._low_size)

    def joined(self, high: torch.Tensor, low: torch.Tensor) -> SplitQuantsWeight:
        from triforce_kernels.weights.split_quants import SplitQuantsWeight

        bits = low[: self._low_size].view(self.rows, -1)
        return SplitQuantsWeight(self.high(high).data, bits, self.kind)

    @property
    def _low_size(self) -> int:
        return self.rows * self.kind.row_bytes(self.columns) - self.draft_bytes


@dataclass(frozen=True)
class SplitExperts(Format):
    """Matrices of experts, one above the other, each split for itself: the bytes of an expert
    follow one another, so that it can be away alone (`triforce_kernels.weights.split_experts`).
    """

    read: ClassVar[Read] = Read.SPLIT_BF16
    draft_read: ClassVar[Read] = Read.SPLIT_BF16
    multiplies_experts: ClassVar[bool] = True
    experts_apart: ClassVar[bool] = True

    count: int
    each: SplitBF16

    @property
    def nbytes(self) -> int:
        return self.count * self.each.nbytes

    def of_share(self, part: int, whole: int) -> SplitExperts:
        return replace(self, count=self.count * part // whole)

    def decoded(self) -> Iterator[Matrix]:
        yield self.each

    def view(self, buffer: torch.Tensor) -> SplitExpertsWeight:
        from triforce_kernels.weights.split_experts import SplitExpertsWeight

        first = self.each.view(buffer[: self.each.nbytes])
        return SplitExpertsWeight.of(first, self.count, self.each.nbytes)


def when_split(stored: Format) -> Format:
    """Return the format in which the same bits are split; the format itself if there is none."""
    if isinstance(stored, Stack):
        return Stack(tuple(map(when_split, stored.parts)))
    if not isinstance(stored, Blocks):
        return stored
    rows, columns, kind = stored.rows, stored.columns, stored.kind
    if kind.name in HIGH_QUANTS:
        return SplitQuants(rows, columns, kind)
    fits = kind is F8_E4M3 and rows * columns <= limits.MOST_SPLIT_NUMBERS
    return SplitFP8(rows, columns) if fits else stored
