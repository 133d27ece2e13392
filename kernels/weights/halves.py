"""float16 matrices in two byte planes, of which the upper is a number by itself.

A float16 number is a sign, 5 bits of exponent and 10 of mantissa, so its upper byte is a number as
it stands: sign, exponent and 2 bits of the mantissa. Nothing is coded, and nothing is saved where a
whole matrix lies; but one that does not fit may have its upper bytes on the device and its lower
ones elsewhere, and drafts read half of it (`upper`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from triforce_kernels.checks import require
from triforce_kernels.weights.planes import UpperPlanes, joined_at_once
from triforce_kernels.weights.stored import SplitWeight


@dataclass(frozen=True)
class HalfWeight(UpperPlanes, SplitWeight):
    """A matrix [rows, columns] of float16. Its `base` is None.

    lower: [rows, columns] uint8
    """

    dtype: ClassVar[torch.dtype] = torch.float16

    lower: torch.Tensor

    def rows(self, first: int, end: int) -> HalfWeight:
        """StoredWeight.rows."""
        return replace(super().rows(first, end), lower=self.lower[first:end])

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


def split_into(matrix: torch.Tensor, into: HalfWeight) -> None:
    """Writes a float16 matrix [rows, columns] into planes, wherever they lie. Raises ValueError."""
    require(
        "split_into",
        matrix.dtype == torch.float16 and tuple(matrix.shape) == into.shape,
        matrix=matrix,
        upper=into.upper,
    )
    # The lower byte of a number comes first.
    both = matrix.contiguous().view(torch.uint8).view(*into.shape, 2)
    into.lower.copy_(both[..., 0])
    into.upper.copy_(both[..., 1])


def join(weight: HalfWeight) -> torch.Tensor:
    """The matrix [rows, columns] in float16."""
    return torch.stack((weight.lower, weight.upper), -1).view(torch.float16).squeeze(-1)


def join_rows(weight: HalfWeight, index: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix by index [n] int64: [n, columns] float16."""
    return join(replace(weight, lower=weight.lower[index], upper=weight.upper[index]))
