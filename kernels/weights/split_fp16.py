"""float16 matrices split into two bytes, of which the high byte is a number by itself.

A float16 number has a sign, 5 bits of exponent and 10 of mantissa, so its high byte is a number as
it is: sign, exponent and 2 bits of the mantissa. Nothing is encoded, and nothing is saved for a
matrix that is in one place. But a matrix that does not fit can have its high bytes on the device
and its low bytes elsewhere, and drafts read half of it (`high`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from triforce_kernels.checks import require
from triforce_kernels.weights.split_bf16 import CodedMatrix, joined_at_once
from triforce_kernels.weights.stored import SplitWeight


@dataclass(frozen=True)
class SplitFP16Weight(CodedMatrix, SplitWeight):
    """A matrix [rows, columns] of float16. Its `base` is None.

    low: [rows, columns] uint8
    """

    dtype: ClassVar[torch.dtype] = torch.float16

    low: torch.Tensor

    def rows(self, first: int, end: int) -> SplitFP16Weight:
        """StoredWeight.rows."""
        return replace(super().rows(first, end), low=self.low[first:end])

    @property
    def decoded_at_once(self) -> int:
        return joined_at_once(self.device)

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        for first, part in self.slices():
            yield first, join(part).to(dtype)

    def lookup(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """StoredWeight.lookup."""
        return join_rows(self, index).to(dtype)

    def joined(self) -> torch.Tensor:
        """SplitWeight.joined."""
        return join(self)

    def write(self, matrix: torch.Tensor) -> None:
        """SplitWeight.write."""
        split_into(matrix, self)


def split_into(matrix: torch.Tensor, into: SplitFP16Weight) -> None:
    """Split a float16 matrix [rows, columns] into the parts of `into`. Raise ValueError."""
    require(
        "split_into",
        matrix.dtype == torch.float16 and tuple(matrix.shape) == into.shape,
        matrix=matrix,
        high=into.high,
    )
    # The low byte of a number comes first.
    both = matrix.contiguous().view(torch.uint8).view(*into.shape, 2)
    into.low.copy_(both[..., 0])
    into.high.copy_(both[..., 1])


def join(weight: SplitFP16Weight) -> torch.Tensor:
    """Return the matrix [rows, columns] in float16."""
    return torch.stack((weight.low, weight.high), -1).view(torch.float16).squeeze(-1)


def join_rows(weight: SplitFP16Weight, index: torch.Tensor) -> torch.Tensor:
    """Return rows of the matrix by index [n] int64: [n, columns] float16."""
    return join(replace(weight, low=weight.low[index], high=weight.high[index]))
