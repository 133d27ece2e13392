"""Weights of 3 or 4 bits, multiplied by few rows: they replace weights that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from triforce_kernels import limits
from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.slices import sliced_product
from triforce_kernels.weights.stored import StoredWeight

# Bits of a number, and the columns that a group of such numbers may have.
GROUPS = {4: (32, 64, 128, 256), 3: (64,)}
# Shares of a group's range that `quantise` begins with, and how often it refines each.
_RANGES, _TURNS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7), 3


@dataclass(frozen=True)
class IntegerWeight(StoredWeight):
    """A matrix [out, in] as integers of 3 or 4 bits with a scale and an offset for each group.

    packed: [out, in * bits / 8] uint8. With 4 bits, the first half of each `group` consecutive
        columns is in the low bits of its bytes and the second half in the high bits, so that they
        need not be interleaved again. With 3 bits, the first 16 of the 24 bytes of a group have the
        low 2 bits of each number, the first quarter of them in their lowest bits; likewise, the
        other 8 bytes have the third bits, the first eighth of them in their lowest bits
    scale, offset: [in / group, out], in the dtype of the rows multiplied: weight = number * scale +
        offset
    """

    packed: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    group: int
    bits: int = 4

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 8 * self.packed.shape[1] // self.bits

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self.packed, self.scale, self.offset))

    def rows(self, first: int, end: int) -> IntegerWeight:
        """StoredWeight.rows."""
        scale, offset = self.scale[:, first:end], self.offset[:, first:end]
        return replace(self, packed=self.packed[first:end], scale=scale, offset=offset)

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        step = max(1, limits.GROUPS_AT_ONCE // self.shape[1])
        for first in range(0, self.shape[0], step):
            yield first, dequantise(self.rows(first, min(first + step, self.shape[0]))).to(dtype)

    def small_batch_matmul(self) -> Callable[[torch.Tensor, IntegerWeight], torch.Tensor]:
        """StoredWeight.small_batch_matmul."""
        return integer_matmul

    @property
    def experts_kernel(self) -> str:
        """StoredWeight.experts_kernel."""
        return "integer_experts"


def quantise(
    weight: torch.Tensor, group: int = 64, inputs: torch.Tensor | None = None, bits: int = 4
) -> IntegerWeight:
    """Round weight [out, in] to 2 ** bits equal steps in each group. Of several candidates for the
    steps, choose the one with the least squared error; steps from the least to the greatest number
    are one candidate.

    inputs: sizes of what each column multiplies, [in] (`inputs.InputSizes`), by which its errors
        count; None if all count alike

    Raises ValueError.
    """
    require(
        "quantise",
        weight.dim() == 2
        and group in GROUPS.get(bits, ())
        and weight.shape[1] % group == 0
        and (inputs is None or inputs.shape == weight.shape[1:]),
        weight=weight,
        group=group,
        inputs=inputs,
        bits=bits,
    )
    groups = weight.float().unflatten(1, (-1, group))
    # Round scale and offset first, so that the integers are chosen for the values used later.
    scale, offset = (x.to(weight.dtype) for x in _fit(groups, _shares(groups, inputs), 2**bits - 1))
    numbers = _nearest(groups, scale.float(), offset.float(), 2**bits - 1).to(torch.uint8)
    packed = (_packed_3 if bits == 3 else _packed_4)(numbers).flatten(1)
    return IntegerWeight(packed, scale.T.contiguous(), offset.T.contiguous(), group, bits)


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


def _packed_4(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bytes of numbers [out, n, group], [out, n, group / 2]."""
    low, high = numbers.chunk(2, -1)
    return low | high << 4


def _packed_3(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bytes of numbers [out, n, group], [out, n, group * 3 / 8]."""
    planes = (numbers & 3).chunk(4, -1), (numbers >> 2).chunk(8, -1)
    joined = [torch.zeros_like(parts[0]) for parts in planes]
    for plane, parts in zip(joined, planes, strict=True):
        for index, part in enumerate(parts):
            plane |= part << 8 // len(parts) * index
    return torch.cat(joined, -1)


def _numbers_of(weight: IntegerWeight) -> torch.Tensor:
    """Return the integers [out, n, group] uint8."""
    group = weight.group
    packed = weight.packed.unflatten(1, (-1, group * weight.bits // 8))
    if weight.bits == 4:
        return torch.cat((packed & 15, packed >> 4), -1)
    low, third = packed.split((group // 4, group // 8), -1)
    low = torch.cat([low >> shift & 3 for shift in range(0, 8, 2)], -1)
    return low | torch.cat([third >> bit & 1 for bit in range(8)], -1) << 2


def _fit(
    groups: torch.Tensor, shares: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset of each group: groups [out, n, group] to [out, n] each.

    The candidates begin with ranges that leave out more and more of the outermost numbers. Each is
    refined in turns: round the numbers to the steps, then fit the steps to the rounded numbers by
    linear regression.

    shares: how much each column counts, [n, group]
    most: the greatest integer
    """
    low, high = groups.amin(-1), groups.amax(-1)
    middle, best = (low + high) / 2, torch.full_like(low, torch.inf)
    best_scale, best_offset = torch.zeros_like(low), low
    for share in _RANGES:
        scale = (high - low) * (share / most)
        offset = middle - most / 2 * scale
        for _ in range(_TURNS):
            numbers = _nearest(groups, scale, offset, most)
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


def _nearest(
    groups: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, most: int
) -> torch.Tensor:
    """Return the integers 0 to `most` that are nearest to the groups. A group of equal numbers has
    a scale of 0, and gets zeros.
    """
    step = scale.where(scale > 0, torch.inf).unsqueeze(-1)
    return ((groups - offset.unsqueeze(-1)) / step).round_().clamp_(0, most)


def dequantise(weight: IntegerWeight) -> torch.Tensor:
    """Return [out, in] in float32."""
    numbers = _numbers_of(weight).to(torch.float32)
    scale, offset = (x.T.float().unsqueeze(-1) for x in (weight.scale, weight.offset))
    return numbers.mul_(scale).add_(offset).flatten(1)


def integer_matmul(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """Multiply x [rows, in] by the transposed weight: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, up to about 64, where reading the weight takes most of the time. Raises
    ValueError.
    """
    count, width = weight.shape
    groups = width // weight.group
    require(
        "integer_matmul",
        x.dim() == 2
        and x.shape[1] == width
        and x.shape[0] > 0
        and x.stride(1) == 1
        and weight.group in GROUPS.get(weight.bits, ())
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
        bits=weight.bits,
    )
    return implementation("integer_matmul", x.device)(x, weight)


def reference_matmul(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    return sliced_product(x, weight.shape[0], weight.dense_rows(torch.float32))
