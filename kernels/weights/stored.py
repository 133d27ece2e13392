"""The interface of every stored format of a weight: a format is a class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, Self, TypeGuard

import torch

from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.weights.block_types import BlockType


class StoredWeight(ABC):
    """A matrix [out, in] that is not stored as a dense tensor."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def rows(self, first: int, end: int) -> Self:
        """Return rows `first` to `end`, as a view."""

    @abstractmethod
    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield dense rows [n, in], some at a time, each with the index of the first."""

    def lookup(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows by index [n]: [n, in]. Raise TypeError for a format that only layers use."""
        raise TypeError(f"rows of a {type(self).__name__} are not looked up")

    def small_batch_matmul(self) -> Callable[[torch.Tensor, Self], torch.Tensor] | None:
        """Return the small-batch matmul for this format, or None to dequantise first.

        It multiplies x [rows, in] of few rows (`limits.FEW_ROWS`) by the transposed weight.
        """
        return None

    @property
    def expert_rows(self) -> int | None:
        """Number of rows of each expert, if it is stored for itself; None if they may be any."""
        return None

    @property
    def experts_kernel(self) -> str | None:
        """Name of the kernel that multiplies by experts that stand one above the other in such a
        weight (`experts.grouped`). None to multiply by one after another.
        """
        return None

    @property
    def most_tile_rows(self) -> int:
        """Number of rows that a GPU's program multiplies by an expert at a time, at most."""
        return FEW_ROWS


def is_split(weight: torch.Tensor | StoredWeight) -> TypeGuard[SplitWeight]:
    """Return whether a weight is split into high and low bits."""
    return isinstance(weight, SplitWeight)


class SplitWeight(StoredWeight):
    """A matrix of numbers that are split into high and low bits: read exactly, or by the high bits
    alone.

    dtype: dtype of the numbers
    """

    dtype: ClassVar[torch.dtype]

    @property
    def block_type(self) -> BlockType | None:
        """The type of the blocks in which a matrix is written; None if it is dense."""
        return None

    def parts(self, step: int) -> Iterator[tuple[int, SplitWeight]]:
        """Yield up to `step` rows at a time, each time with the index of the first: parts that can
        be written one after the other.
        """
        for first in range(0, self.shape[0], step):
            yield first, self.rows(first, min(first + step, self.shape[0]))

    @abstractmethod
    def joined(self) -> torch.Tensor:
        """Return the exact matrix: [out, in] in `dtype`."""

    @abstractmethod
    def write(self, matrix: torch.Tensor) -> None:
        """Split a matrix [out, in], or its blocks [out, bytes of a row], into this one's parts.
        Raise ValueError.
        """
