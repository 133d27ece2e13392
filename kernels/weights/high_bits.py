"""The high bits of a matrix, read alone: drafting reads 8 of a number's 12 bits.

The bytes are those of `split_bf16`; nothing else is stored. Mantissa bits that are not read are
assumed to be in the middle of their range. Exceptions, and numbers that are not finite, count as 0.
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


@dataclass(frozen=True)
class HighBitsWeight(CodedMatrix):
    """A matrix [rows, columns] that approximates the split matrix of which it is the high bits."""

    @classmethod
    def of(cls, weight: CodedMatrix) -> HighBitsWeight:
        """Return the high bits of a weight, as a view."""
        return cls(weight.high, weight.base)

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        for first, part in self.slices():
            yield first, decode(part).to(dtype)

    def small_batch_matmul(self) -> Callable[[torch.Tensor, HighBitsWeight], torch.Tensor]:
        """StoredWeight.small_batch_matmul."""
        return high_bits_matmul

    @property
    def experts_kernel(self) -> str:
        """StoredWeight.experts_kernel."""
        return "high_bits_experts"


def decode(weight: HighBitsWeight) -> torch.Tensor:
    """Return [rows, columns] in bfloat16."""
    return middle_bits(weight.high, weight.base.unsqueeze(1)).view(torch.bfloat16)


def high_bits_matmul(x: torch.Tensor, weight: HighBitsWeight) -> torch.Tensor:
    """Multiply x [rows, in] by the transposed weight: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, up to about 64, where reading the weight takes most of the time. Raises
    ValueError.
    """
    (rows, columns), base = weight.shape, weight.base
    require(
        "high_bits_matmul",
        x.dim() == 2
        and x.shape[0] > 0
        and x.shape[1] == columns
        and x.stride(1) == 1
        and weight.high.is_contiguous()
        and weight.high.dtype == torch.uint8
        and base.shape == (rows,)
        and base.dtype == torch.uint8
        and x.device == weight.device == base.device,
        x=x,
        high=weight.high,
        base=base,
    )
    return implementation("high_bits_matmul", x.device)(x, weight)


def reference_matmul(x: torch.Tensor, weight: HighBitsWeight) -> torch.Tensor:
    return sliced_product(x, weight.shape[0], ((i, decode(part)) for i, part in weight.slices()))
