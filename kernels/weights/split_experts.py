"""Matrices of experts in bfloat16, in 12 bits per number, without loss: each split for itself.

One split matrix of all experts would have one list of exceptions. Here the bytes of an expert
follow one another, so that it can cross a link alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from triforce_kernels import limits
from triforce_kernels.weights.split_bf16 import SplitBF16Weight
from triforce_kernels.weights.stored import SplitWeight


@dataclass(frozen=True)
class SplitExpertsWeight(SplitWeight):
    """Matrices [rows, columns] of experts, one above the other.

    The first dimension of each tensor is that of the experts, which are equally many bytes apart in
    all of them. The others are as in SplitBF16Weight.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    high: torch.Tensor
    base: torch.Tensor
    low: torch.Tensor
    places: torch.Tensor
    patterns: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, first: SplitBF16Weight, count: int, apart: int) -> SplitExpertsWeight:
        """first: the first of `count` experts, which are `apart` bytes from one another"""
        return cls(
            *(
                part.as_strided((count, *part.shape), (apart // part.itemsize, *part.stride()))
                for part in _tensors(first)
            )
        )

    @property
    def shape(self) -> tuple[int, int]:
        count, rows, columns = self.high.shape
        return count * rows, columns

    @property
    def device(self) -> torch.device:
        return self.high.device

    @property
    def apart(self) -> int:
        """Bytes from an expert to the next."""
        return self.high.stride(0)

    def expert(self, index: int) -> SplitBF16Weight:
        """Return the matrix of one expert. Raises IndexError."""
        return SplitBF16Weight(*(part[index] for part in _tensors(self)))

    def rows(self, first: int, end: int) -> SplitWeight:
        """StoredWeight.rows, of one expert or of whole ones. Raises ValueError for others."""
        each = self.high.shape[1]
        expert, row = divmod(first, each)
        if row + end - first <= each:
            return self.expert(expert).rows(row, row + end - first)
        if row or end % each:
            raise ValueError(f"rows {first} to {end} are parts of several experts of {each} rows")
        return SplitExpertsWeight(*(part[expert : end // each] for part in _tensors(self)))

    def parts(self, step: int) -> Iterator[tuple[int, SplitWeight]]:
        """SplitWeight.parts: none is of two experts."""
        count, each, _ = self.high.shape
        for expert in range(count):
            for first, part in self.expert(expert).parts(step):
                yield expert * each + first, part

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        count, each, _ = self.high.shape
        for expert in range(count):
            for first, rows in self.expert(expert).dense_rows(dtype):
                yield expert * each + first, rows

    @property
    def expert_rows(self) -> int:
        """StoredWeight.expert_rows."""
        return self.high.shape[1]

    @property
    def experts_kernel(self) -> str:
        """StoredWeight.experts_kernel."""
        return "split_experts"

    @property
    def most_tile_rows(self) -> int:
        """StoredWeight.most_tile_rows."""
        return limits.SPLIT_TILE

    def joined(self) -> torch.Tensor:
        """SplitWeight.joined."""
        return torch.cat([self.expert(index).joined() for index in range(len(self.high))])

    def write(self, matrix: torch.Tensor) -> None:
        """SplitWeight.write. Raise SplitError for more exceptions than an expert has room for."""
        each = self.high.shape[1]
        for index, rows in enumerate(matrix.split(each)):
            self.expert(index).write(rows)


def _tensors(weight: SplitBF16Weight | SplitExpertsWeight) -> tuple[torch.Tensor, ...]:
    """Return the tensors in the order of both classes."""
    numbers = weight.high, weight.base, weight.low
    return *numbers, weight.places, weight.patterns, weight.starts
