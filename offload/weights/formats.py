"""Formats in which numbers are stored. Sizes need no tensors, so plans are made without torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Protocol

from triforce_kernels.weights.block_types import WITH_TABLES, BlockType

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.blocks import BlockWeight
    from triforce_kernels.weights.integers import IntegerWeight
    from triforce_kernels.weights.linear import StackedWeight, Weight

# Bytes. With equal alignment everywhere, vectorised kernels give bitwise equal results at any
# placement.
ALIGNMENT = 256


class ElementType(Protocol):
    """A torch.dtype, or for a plan anything that has an `itemsize`."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True)
class Dtype:
    """An element type by its torch name, for plans made where torch is not loaded."""

    name: str
    itemsize: int


DTYPES = {t.name: t for t in (Dtype("float32", 4), Dtype("bfloat16", 2), Dtype("float16", 2))}

FLOAT32 = DTYPES["float32"]


def dtype_name(dtype: ElementType) -> str:
    """Return the name that torch has for an element type."""
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


class Read(Enum):
    """How a product turns the bytes of a matrix into numbers.

    AS_STORED: no decoding
    SPLIT_BF16: all bits of split bfloat16
    SPLIT_BLOCKS: all bits of split blocks
    HIGH: high bits of bfloat16 alone
    GROUPS: groups of 4-bit numbers
    SMALL_GROUPS: groups of 3-bit numbers
    BLOCKS: blocks of a few bits a number, of GGUF, FP8, AWQ and GPTQ
    TABLES: blocks whose numbers are in tables, IQ2 and IQ3
    """

    AS_STORED = "as stored"
    SPLIT_BF16 = "split bf16"
    SPLIT_BLOCKS = "split blocks"
    HIGH = "high bits"
    GROUPS = "groups"
    SMALL_GROUPS = "small groups"
    BLOCKS = "blocks"
    TABLES = "tables"


class Format(ABC):
    """How one tensor is stored in flat buffers: one buffer of high bits and, if the tensor is
    split, one of low bits, which only passes read.

    read: how an exact product reads the tensor
    draft_read: how a product for drafts reads the tensor
    split: whether the tensor has low bits
    multiplies_experts: whether a kernel multiplies by experts that stand one above the other in
        such a matrix, where kernels know its block type
    experts_apart: whether it is of experts of which each is split for itself
    """

    read: ClassVar[Read] = Read.AS_STORED
    draft_read: ClassVar[Read] = Read.AS_STORED
    split: ClassVar[bool] = False
    multiplies_experts: ClassVar[bool] = False
    experts_apart: ClassVar[bool] = False

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def view(self, buffer: torch.Tensor) -> Weight:
        """Return the tensor in a flat uint8 buffer of `nbytes` bytes."""

    def of_share(self, part: int, whole: int) -> Format | None:
        """Return the format of a share of the rows; None if the bytes of rows do not follow one
        another.
        """
        return None

    @property
    def high_bytes(self) -> int:
        """Size without the low bits."""
        return self.nbytes

    @property
    def low_bytes(self) -> int:
        return 0

    @property
    def draft_bytes(self) -> int:
        """Bytes that a product for drafts reads."""
        return self.nbytes

    def joined(self, high: torch.Tensor, low: torch.Tensor) -> Weight:
        """Return the tensor in two buffers that begin with its high and its low bits."""
        return self.view(high[: self.nbytes])

    def high(self, buffer: torch.Tensor) -> Weight:
        """Return the tensor that can be read without the low bits."""
        return self.view(buffer[: self.nbytes])

    def decoded(self) -> Iterator[Matrix]:
        """Yield the parts that products decode, either first or while they multiply."""
        yield from ()


@dataclass(frozen=True)
class Dense(Format):
    """Every element as it is, row by row."""

    multiplies_experts: ClassVar[bool] = True

    shape: tuple[int, ...]
    dtype: ElementType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of_share(self, part: int, whole: int) -> Dense:
        return replace(self, shape=(self.shape[0] * part // whole, *self.shape[1:]))

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        import torch

        return buffer.view(getattr(torch, dtype_name(self.dtype))).view(self.shape)


@dataclass(frozen=True)
class Matrix(Format):
    """A matrix that is not dense."""

    rows: int
    columns: int

    @property
    def block_type(self) -> BlockType | None:
        """The type of its blocks; None if it is not stored in blocks."""
        return None

    def decoded(self) -> Iterator[Matrix]:
        yield self


@dataclass(frozen=True)
class Blocks(Matrix):
    """A matrix in a block type, row by row."""

    multiplies_experts: ClassVar[bool] = True

    kind: BlockType

    @property
    def read(self) -> Read:  # type: ignore[override]
        return Read.TABLES if self.kind.name in WITH_TABLES else Read.BLOCKS

    @property
    def draft_read(self) -> Read:  # type: ignore[override]
        return self.read

    @property
    def nbytes(self) -> int:
        return self.rows * self.kind.row_bytes(self.columns)

    def of_share(self, part: int, whole: int) -> Blocks:
        return replace(self, rows=self.rows * part // whole)

    @property
    def block_type(self) -> BlockType:
        return self.kind

    def view(self, buffer: torch.Tensor) -> BlockWeight:
        from triforce_kernels.weights.blocks import BlockWeight

        return BlockWeight(buffer.view(self.rows, -1), self.kind, self.columns)


@dataclass(frozen=True)
class Groups(Format):
    """A matrix of integers of 3 or 4 bits, with a scale and an offset in `dtype` for each `group`
    columns of a row (`triforce_kernels.weights.integers`).
    """

    multiplies_experts: ClassVar[bool] = True

    rows: int
    columns: int
    group: int
    dtype: ElementType
    bits: int = 4

    @property
    def read(self) -> Read:  # type: ignore[override]
        return Read.GROUPS if self.bits == 4 else Read.SMALL_GROUPS

    @property
    def nbytes(self) -> int:
        return aligned(self._packed_bytes) + 2 * aligned(self._scale_bytes)

    def view(self, buffer: torch.Tensor) -> IntegerWeight:
        from triforce_kernels.weights.integers import IntegerWeight

        packed = buffer[: self._packed_bytes].view(self.rows, -1)
        after, scales = aligned(self._packed_bytes), []
        for start in (after, after + aligned(self._scale_bytes)):
            scale = buffer[start : start + self._scale_bytes].view(self.dtype)
            scales.append(scale.view(-1, self.rows))
        return IntegerWeight(packed, *scales, self.group, self.bits)

    @property
    def _packed_bytes(self) -> int:
        return self.rows * self.columns * self.bits // 8

    @property
    def _scale_bytes(self) -> int:
        return self.rows * self.columns // self.group * self.dtype.itemsize


@dataclass(frozen=True)
class Stack(Format):
    """Matrices of different formats, one above the other."""

    draft_read: ClassVar[Read] = Read.BLOCKS

    parts: tuple[Format, ...]

    @property
    def read(self) -> Read:  # type: ignore[override]
        return Read.SPLIT_BLOCKS if self.split else Read.BLOCKS

    @property
    def split(self) -> bool:  # type: ignore[override]
        return any(part.split for part in self.parts)

    @property
    def nbytes(self) -> int:
        return self.high_bytes + self.low_bytes

    @property
    def high_bytes(self) -> int:
        return sum(aligned(part.high_bytes) for part in self.parts)

    @property
    def low_bytes(self) -> int:
        return sum(aligned(part.low_bytes) for part in self.parts)

    @property
    def draft_bytes(self) -> int:
        return sum(part.draft_bytes for part in self.parts)

    def decoded(self) -> Iterator[Matrix]:
        for part in self.parts:
            yield from part.decoded()

    def view(self, buffer: torch.Tensor) -> StackedWeight:
        return self.joined(buffer[: self.high_bytes], buffer[self.high_bytes :])

    def joined(self, high: torch.Tensor, low: torch.Tensor) -> StackedWeight:
        from triforce_kernels.weights.linear import StackedWeight

        views = []
        for part in self.parts:
            views.append(part.joined(high, low))
            high, low = high[aligned(part.high_bytes) :], low[aligned(part.low_bytes) :]
        return StackedWeight(tuple(views))

    def high(self, buffer: torch.Tensor) -> StackedWeight:
        from triforce_kernels.weights.linear import StackedWeight

        views = []
        for part in self.parts:
            views.append(part.high(buffer))
            buffer = buffer[aligned(part.high_bytes) :]
        return StackedWeight(tuple(views))


def matrix(
    pieces: Sequence[tuple[int, BlockType | None]], columns: int, dtype: ElementType
) -> Format:
    """Return the format of a matrix made of pieces. Each piece is its number of rows and its block
    type, or None for a piece that is kept in `dtype`.
    """
    merged: list[tuple[int, BlockType | None]] = []
    for rows, kind in pieces:
        if merged and merged[-1][1] == kind:
            rows += merged.pop()[0]
        merged.append((rows, kind))
    parts = tuple(
        Dense((rows, columns), dtype) if kind is None else Blocks(rows, columns, kind)
        for rows, kind in merged
    )
    return parts[0] if len(parts) == 1 else Stack(parts)


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
