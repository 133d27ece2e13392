"""Weights of 4 bits, multiplied by a few rows: what stands in for weights that do not fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import require
from .dispatch import implementation

GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Int4Weight:
    """A matrix [out, in] as whole numbers 0 to 15 with a scale and an offset for each group.

    packed: [out, in / 2] uint8. Of each `group` consecutive columns the first half lies in the low
        bits, the second half in the high ones, so that neither has to be interleaved again.
    scale, offset: [in / group, out], the dtype of what multiplies: weight = number * scale + offset
    """

    packed: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self.packed, self.scale, self.offset))


def quantise(weight: torch.Tensor, group: int = 64) -> Int4Weight:
    """Rounds weight [out, in] to 16 equal steps between the least and greatest of each group.

    No element is off by more than half a step and the rounding of the scale. Raises ValueError.
    """
    require(
        "quantise",
        weight.dim() == 2 and group in GROUPS and weight.shape[1] % group == 0,
        weight=weight,
        group=group,
    )
    groups = weight.float().unflatten(1, (-1, group))
    least, most = groups.amin(-1), groups.amax(-1)
    # Rounded first: numbers are chosen for the scale and offset that they will be used with.
    scale, offset = (x.to(weight.dtype) for x in ((most - least) / 15, least))
    step = scale.float().where(scale > 0, 1).unsqueeze(-1)
    numbers = ((groups - offset.float().unsqueeze(-1)) / step).round_().clamp_(0, 15)
    low, high = numbers.to(torch.uint8).chunk(2, -1)
    packed = (low | high << 4).flatten(1)
    return Int4Weight(packed, scale.T.contiguous(), offset.T.contiguous(), group)


def dequantise(weight: Int4Weight) -> torch.Tensor:
    """[out, in] float32."""
    parts = weight.packed.unflatten(1, (-1, weight.group // 2))
    numbers = torch.cat((parts & 15, parts >> 4), -1).to(torch.float32)
    scale, offset = (x.T.float().unsqueeze(-1) for x in (weight.scale, weight.offset))
    return numbers.mul_(scale).add_(offset).flatten(1)


def int4_matmul(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """x [rows, in] times the weight, transposed: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, 1 to 64 or so, where the weight's bytes are what it takes.
    Raises ValueError.
    """
    count, width = weight.shape
    groups = width // weight.group
    require(
        "int4_matmul",
        x.dim() == 2
        and x.shape[1] == width
        and x.shape[0] > 0
        and x.stride(1) == 1
        and x.dtype == weight.scale.dtype == weight.offset.dtype
        and weight.packed.dtype == torch.uint8
        and weight.packed.is_contiguous()
        and weight.scale.shape == weight.offset.shape == (groups, count)
        and weight.scale.is_contiguous()
        and weight.offset.is_contiguous()
        and x.device == weight.packed.device == weight.scale.device == weight.offset.device,
        x=x,
        packed=weight.packed,
        scale=weight.scale,
        offset=weight.offset,
        group=weight.group,
    )
    return implementation("int4_matmul", x.device)(x, weight)


def reference_matmul(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    return (x.float() @ dequantise(weight).T).to(x.dtype)
