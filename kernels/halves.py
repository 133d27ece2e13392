"""float16 matrices in two byte planes, of which the upper is a number by itself.

A float16 number is a sign, 5 bits of exponent and 10 of mantissa, so its upper byte is a number as
it stands: sign, exponent and 2 bits of the mantissa. Nothing is coded, and nothing is saved where a
whole matrix lies; but one that does not fit may have its upper bytes on the device and its lower
ones elsewhere, and drafts read half of it (`upper`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .checks import require
from .planes import UpperPlanes, joined_at_once


@dataclass(frozen=True)
class HalfWeight(UpperPlanes):
    """A matrix [rows, columns] of float16. Its `base` is None.

    lower: [rows, columns] uint8
    """

    lower: torch.Tensor

    def rows(self, first: int, end: int) -> HalfWeight:
        """Some of its rows; a view."""
        return replace(super().rows(first, end), lower=self.lower[first:end])

    @property
    def decoded_at_once(self) -> int:
        return joined_at_once(self.device)


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
