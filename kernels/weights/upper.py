"""The upper planes of a matrix, read alone: what drafts with 8 of a number's 12 bits.

Nothing is stored for it: the bytes are those of `planes`, or of `halves`, which verify too. The
bits of the mantissa that are not read are taken to be in the middle of what they may be;
exceptions, and what is not finite, are taken to be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.plane_codes import middle_bits
from triforce_kernels.weights.planes import UpperPlanes
from triforce_kernels.weights.slices import sliced_product

# Of float16's upper byte: what is 0 of a zero, and all ones of what is not finite; and the middle
# of the lower byte.
_HALF_MAGNITUDE, _HALF_EXPONENT = 0x7F, 0x7C
_MIDDLE = 0x80


@dataclass(frozen=True)
class UpperWeight(UpperPlanes):
    """A matrix [rows, columns], about that of the planes that it is part of."""

    @classmethod
    def of(cls, weight: UpperPlanes) -> UpperWeight:
        """A view."""
        return cls(weight.upper, weight.base)

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        for first, part in self.slices():
            yield first, decode(part).to(dtype)

    def small_batch_matmul(self) -> Callable[[torch.Tensor, UpperWeight], torch.Tensor]:
        """StoredWeight.small_batch_matmul."""
        return upper_matmul


def decode(weight: UpperWeight) -> torch.Tensor:
    """[rows, columns] in bfloat16, or in float16 if it has no bases."""
    if weight.base is None:
        return _decode_halves(weight.upper)
    return middle_bits(weight.upper, weight.base.unsqueeze(1)).view(torch.bfloat16)


def upper_matmul(x: torch.Tensor, weight: UpperWeight) -> torch.Tensor:
    """x [rows, in] times the weight, transposed: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, 1 to 64 or so, where the weight's bytes are what it takes.
    Raises ValueError.
    """
    columns, base = weight.shape[1], weight.base
    require(
        "upper_matmul",
        x.dim() == 2
        and x.shape[0] > 0
        and x.shape[1] == columns
        and x.stride(1) == 1
        and weight.upper.is_contiguous()
        and weight.upper.dtype == torch.uint8
        and x.device == weight.device
        and (base is None or _fits(base, weight)),
        x=x,
        upper=weight.upper,
        **({} if base is None else {"base": base}),
    )
    return implementation("upper_matmul", x.device)(x, weight)


def _fits(base: torch.Tensor, weight: UpperWeight) -> bool:
    rows = weight.shape[0]
    return base.shape == (rows,) and base.dtype == torch.uint8 and base.device == weight.device


def _decode_halves(upper: torch.Tensor) -> torch.Tensor:
    bits = upper.view(torch.int8).to(torch.int16) << 8
    bits |= _MIDDLE
    nothing = (upper & _HALF_MAGNITUDE == 0) | (upper & _HALF_EXPONENT == _HALF_EXPONENT)
    return bits.masked_fill_(nothing, 0).view(torch.float16)


def reference_matmul(x: torch.Tensor, weight: UpperWeight) -> torch.Tensor:
    return sliced_product(x, weight.shape[0], ((i, decode(part)) for i, part in weight.slices()))
