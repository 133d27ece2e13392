"""The high bits of a matrix, read alone: what drafts with 8 of a number's 12 bits.

The bytes are those of `split_bf16` or `split_fp16`: nothing else is stored. The bits of the
mantissa that are not read are taken to be in the middle of their range. Exceptions, and numbers
that are not finite, count as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.slices import sliced_product
from triforce_kernels.weights.split_bf16 import CodedMatrix
from triforce_kernels.weights.split_codes import middle_bits

# Of float16's high byte: what is 0 of a zero, and all ones of what is not finite; and the middle
# of the low byte.
_HALF_MAGNITUDE, _HALF_EXPONENT = 0x7F, 0x7C
_MIDDLE = 0x80


@dataclass(frozen=True)
class HighBitsWeight(CodedMatrix):
    """A matrix [rows, columns], approximately the split matrix whose high bits it is."""

    @classmethod
    def of(cls, weight: CodedMatrix) -> HighBitsWeight:
        """A view."""
        return cls(weight.high, weight.base)

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        for first, part in self.slices():
            yield first, decode(part).to(dtype)

    def small_batch_matmul(self) -> Callable[[torch.Tensor, HighBitsWeight], torch.Tensor]:
        """StoredWeight.small_batch_matmul."""
        return high_bits_matmul


def decode(weight: HighBitsWeight) -> torch.Tensor:
    """[rows, columns] in bfloat16, or in float16 if it has no bases."""
    if weight.base is None:
        return _decode_halves(weight.high)
    return middle_bits(weight.high, weight.base.unsqueeze(1)).view(torch.bfloat16)


def high_bits_matmul(x: torch.Tensor, weight: HighBitsWeight) -> torch.Tensor:
    """x [rows, in] times the weight, transposed: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, 1 to 64 or so, where the weight's bytes are what it takes.
    Raises ValueError.
    """
    columns, base = weight.shape[1], weight.base
    require(
        "high_bits_matmul",
        x.dim() == 2
        and x.shape[0] > 0
        and x.shape[1] == columns
        and x.stride(1) == 1
        and weight.high.is_contiguous()
        and weight.high.dtype == torch.uint8
        and x.device == weight.device
        and (base is None or _fits(base, weight)),
        x=x,
        high=weight.high,
        **({} if base is None else {"base": base}),
    )
    return implementation("high_bits_matmul", x.device)(x, weight)


def _fits(base: torch.Tensor, weight: HighBitsWeight) -> bool:
    rows = weight.shape[0]
    return base.shape == (rows,) and base.dtype == torch.uint8 and base.device == weight.device


def _decode_halves(high: torch.Tensor) -> torch.Tensor:
    bits = high.view(torch.int8).to(torch.int16) << 8
    bits |= _MIDDLE
    nothing = (high & _HALF_MAGNITUDE == 0) | (high & _HALF_EXPONENT == _HALF_EXPONENT)
    return bits.masked_fill_(nothing, 0).view(torch.float16)


def reference_matmul(x: torch.Tensor, weight: HighBitsWeight) -> torch.Tensor:
    return sliced_product(x, weight.shape[0], ((i, decode(part)) for i, part in weight.slices()))
