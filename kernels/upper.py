"""The upper planes of a matrix, read alone: what drafts with 8 of a number's 12 bits.

Nothing is stored for it: the bytes are those of `planes`, which verify too. The 4 bits of the
mantissa that are not read are taken to be in the middle of what they may be; exceptions are taken
to be 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import require
from .dispatch import implementation
from .plane_codes import middle_bits
from .planes import UpperPlanes
from .slices import sliced_product


@dataclass(frozen=True)
class UpperWeight(UpperPlanes):
    """A matrix [rows, columns], about that of the planes that it is part of."""

    @classmethod
    def of(cls, weight: UpperPlanes) -> UpperWeight:
        """A view."""
        return cls(weight.upper, weight.base)


def decode(weight: UpperWeight) -> torch.Tensor:
    """[rows, columns] bfloat16."""
    return middle_bits(weight.upper, weight.base.unsqueeze(1)).view(torch.bfloat16)


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
    return sliced_product(x, weight.shape[0], ((i, decode(part)) for i, part in weight.slices()))
