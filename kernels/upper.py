"""The upper planes of a matrix, read alone: what drafts with 8 of a number's 12 bits.

Nothing is stored for it: the bytes are those of `planes`, which verify too. The 4 bits of the
mantissa that are not read are taken to be in the middle of what they may be; exceptions are taken
to be 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import limits
from .checks import require
from .dispatch import implementation
from .planes import CODE, PlaneWeight, upper_bits

# The middle of the lower 4 bits of a mantissa.
_MIDDLE = 8


@dataclass(frozen=True)
class UpperWeight:
    """A matrix [rows, columns], about that of the planes that it is part of.

    upper: [rows, columns] uint8; base: [rows] uint8
    """

    upper: torch.Tensor
    base: torch.Tensor

    @classmethod
    def of(cls, weight: PlaneWeight) -> UpperWeight:
        """A view."""
        return cls(weight.upper, weight.base)

    @property
    def shape(self) -> tuple[int, int]:
        return self.upper.shape[0], self.upper.shape[1]

    @property
    def device(self) -> torch.device:
        return self.upper.device

    @property
    def rows_at_once(self) -> int:
        """Rows that are decoded at a time."""
        return max(1, limits.DECODED_AT_ONCE // self.upper.shape[1])

    def rows(self, first: int, end: int) -> UpperWeight:
        """Some of its rows; a view."""
        return UpperWeight(self.upper[first:end], self.base[first:end])


def decode(weight: UpperWeight) -> torch.Tensor:
    """[rows, columns] bfloat16."""
    bits = upper_bits(weight.upper, weight.base)
    bits += _MIDDLE
    bits.masked_fill_(weight.upper & CODE == 0, 0)
    return bits.view(torch.bfloat16)


def upper_matmul(x: torch.Tensor, weight: UpperWeight) -> torch.Tensor:
    """x [rows, in] times the weight, transposed: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, 1 to 64 or so, where the weight's bytes are what it takes.
    Raises ValueError.
    """
    rows, columns = weight.shape
    require(
        "upper_matmul",
        x.dim() == 2
        and x.shape[0] > 0
        and x.shape[1] == columns
        and x.stride(1) == 1
        and weight.upper.is_contiguous()
        and weight.base.shape == (rows,)
        and weight.upper.dtype == weight.base.dtype == torch.uint8
        and x.device == weight.device == weight.base.device,
        x=x,
        upper=weight.upper,
        base=weight.base,
    )
    return implementation("upper_matmul", x.device)(x, weight)


def reference_matmul(x: torch.Tensor, weight: UpperWeight) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    wide = x.float()
    for first in range(0, weight.shape[0], weight.rows_at_once):
        part = decode(weight.rows(first, first + weight.rows_at_once))
        out[:, first : first + part.shape[0]] = F.linear(wide, part.float())
    return out
