"""4-bit weights, multiplied by few rows: they replace weights that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from triforce_kernels import limits
from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.slices import sliced_product
from triforce_kernels.weights.stored import StoredWeight

GROUPS = (32, 64, 128, 256)
# Shares of a group's range that `quantise` begins with, and how often it refines each.
_RANGES, _TURNS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7), 3


@dataclass(frozen=True)
class Int4Weight(StoredWeight):
    """A matrix [out, in] as integers 0 to 15 with a scale and an offset for each group.

    packed: [out, in / 2] uint8. Of each `group` consecutive columns the first half is in the low
        bits and the second half in the high bits, so that they need not be interleaved again
    scale, offset: [in / group, out], in the dtype of the rows multiplied: weight = number * scale +
        offset
    """

    packed: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self.packed, self.scale, self.offset))

    def rows(self, first: int, end: int) -> Int4Weight:
        """StoredWeight.rows."""
        scale, offset = self.scale[:, first:end], self.offset[:, first:end]
        return replace(self, packed=self.packed[first:end], scale=scale, offset=offset)

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        step = max(1, limits.GROUPS_AT_ONCE // self.shape[1])
        for first in range(0, self.shape[0], step):
            yield first, dequantise(self.rows(first, min(first + step, self.shape[0]))).to(dtype)

    def small_batch_matmul(self) -> Callable[[torch.Tensor, Int4Weight], torch.Tensor]:
        """StoredWeight.small_batch_matmul."""
        return int4_matmul

    @property
    def experts_kernel(self) -> str:
        """StoredWeight.experts_kernel."""
        return "int4_experts"


def quantise(
    weight: torch.Tensor, group: int = 64, inputs: torch.Tensor | None = None
) -> Int4Weight:
    """Round weight [out, in] to 16 equal steps in each group. Of several candidates for the steps,
    choose the one with the least squared error; 16 steps from the least to the greatest number are
    one candidate.

    inputs: sizes of what each column multiplies, [in] (`inputs.InputSizes`), by which its errors
        count; None if all count alike

    Raises ValueError.
    """
    require(
        "quantise",
        weight.dim() == 2
        and group in GROUPS
        and weight.shape[1] % group == 0
        and (inputs is None or inputs.shape == weight.shape[1:]),
        weight=weight,
        group=group,
        inputs=inputs,
    )
    groups = weight.float().unflatten(1, (-1, group))
    # Round scale and offset first, so that the integers are chosen for the values used later.
    scale, offset = (x.to(weight.dtype) for x in _fit(groups, _shares(groups, inputs)))
    numbers = _nearest(groups, scale.float(), offset.float())
    low, high = numbers.to(torch.uint8).chunk(2, -1)
    packed = (low | high << 4).flatten(1)
    return Int4Weight(packed, scale.T.contiguous(), offset.T.contiguous(), group)


def _shares(groups: torch.Tensor, inputs: torch.Tensor | None) -> torch.Tensor:
    """Return how much the error of each column counts in its group, [n, group]: groups [out, n,
    group]. The shares of a group add up to 1.
    """
    if inputs is None:
        inputs = groups.new_ones(groups.shape[1] * groups.shape[2])
    shares = inputs.to(groups.device, torch.float32).unflatten(0, groups.shape[1:])
    # A group whose inputs were all 0 is rounded as if they were equal.
    total = shares.sum(-1, keepdim=True)
    return torch.where(total > 0, shares / total, 1 / shares.shape[-1])


def _fit(groups: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset of each group: groups [out, n, group] to [out, n] each.

    The candidates begin with ranges that leave out more and more of the outermost numbers. Each is
    refined in turns: round the numbers to the steps, then fit the steps to the rounded numbers by
    linear regression.

    shares: how much each column counts, [n, group]
    """
    least, most = groups.amin(-1), groups.amax(-1)
    middle, best = (least + most) / 2, torch.full_like(least, torch.inf)
    best_scale, best_offset = torch.zeros_like(least), least
    for share in _RANGES:
        scale = (most - least) * (share / 15)
        offset = middle - 7.5 * scale
        for _ in range(_TURNS):
            numbers = _nearest(groups, scale, offset)
            off = numbers * scale.unsqueeze(-1)
            off = off.add_(offset.unsqueeze(-1)).sub_(groups).square_().mul_(shares).sum(-1)
            better = off < best
            best = off.where(better, best)
            best_scale, best_offset = (
                scale.where(better, best_scale),
                offset.where(better, best_offset),
            )
            mean, centre = (groups * shares).sum(-1), (numbers * shares).sum(-1)
            numbers.sub_(centre.unsqueeze(-1))
            spread = numbers.square().mul_(shares).sum(-1)
            numbers.mul_(groups).mul_(shares)
            scale = numbers.sum(-1).div_(spread).where(spread > 0, 0.0)
            offset = mean - centre * scale
    return best_scale, best_offset


def _nearest(groups: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the integers 0 to 15 that are nearest to the groups. A group of equal numbers has a
    scale of 0, and gets zeros.
    """
    step = scale.where(scale > 0, torch.inf).unsqueeze(-1)
    return ((groups - offset.unsqueeze(-1)) / step).round_().clamp_(0, 15)


def dequantise(weight: Int4Weight) -> torch.Tensor:
    """Return [out, in] in float32."""
    parts = weight.packed.unflatten(1, (-1, weight.group // 2))
    numbers = torch.cat((parts & 15, parts >> 4), -1).to(torch.float32)
    scale, offset = (x.T.float().unsqueeze(-1) for x in (weight.scale, weight.offset))
    return numbers.mul_(scale).add_(offset).flatten(1)


def int4_matmul(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """Multiply x [rows, in] by the transposed weight: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, up to about 64, where reading the weight takes most of the time. Raises
    ValueError.
    """
    count, width = weight.shape
    groups = width // weight.group
    require(
        "int4_matmul",
        x.dim() == 2
        and x.shape[1] == width
        and x.shape[0] > 0
        and x.stride(1) == 1
        and weight.group in GROUPS
        and x.dtype == weight.scale.dtype == weight.offset.dtype
        and weight.packed.dtype == torch.uint8
        and weight.packed.is_contiguous()
        and weight.scale.shape == weight.offset.shape == (groups, count)
        # Those of some rows of a matrix are not contiguous.
        and weight.scale.stride() == weight.offset.stride()
        and weight.scale.stride(1) == 1
        and x.device == weight.packed.device == weight.scale.device == weight.offset.device,
        x=x,
        packed=weight.packed,
        scale=weight.scale,
        offset=weight.offset,
        group=weight.group,
    )
    return implementation("int4_matmul", x.device)(x, weight)


def reference_matmul(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    return sliced_product(x, weight.shape[0], weight.dense_rows(torch.float32))
