"""Matrices in blocks of F8_E4M3, bit for bit, of which 5.25 bits per number are blocks that can be
computed with alone (F8_HIGH).

The base of a block is the greatest exponent field of its 128 numbers, or LEAST_BASE. The high bits
of a number are its sign and a code of 4 bits. A code says more of the mantissa of larger numbers:

    code        field                     bits of the mantissa    low bits
    4 to 15     base - 3 + code / 4       2                       1
    2 and 3     base - 3                  1                       2
    1           base - 4                  none                    3
    0           any other                 none                    7: field and mantissa

The low bits are those that the code does not say. They follow one another, each number's from its
lowest on, and each row begins with a byte. Normal numbers have 2.1 of them on average; there is
room for 2.9 (`limits.LOW_BYTES_OF_FP8`). Read alone, a code stands for about the mean of its
numbers (`blocks.F8_LEVELS`), and code 0 for half of the least number above.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.block_types import F8_E4M3, F8_HIGH, BlockType
from triforce_kernels.weights.blocks import f8_high_parts
from triforce_kernels.weights.split_bf16 import SplitError
from triforce_kernels.weights.split_blocks import SplitBlocksWeight

_NUMBERS = F8_E4M3.elements
# With it, the numbers with code 1 have the field 1, the least of those that are not subnormal.
LEAST_BASE = 5
# The scale of F8_HIGH is that of the block times 2 to the power of its base less this.
SCALED_BASE = 13
CANNOT_SCALE = "a scale of FP8 is too small, or too large, to be split"
# How many low bits the codes have.
LOW_BITS = (7, 3, 2, 2, *12 * (1,))
_MOST_BITS = max(LOW_BITS)
# Numbers that are split at a time: the temporaries stay in a processor's cache.
_SPLIT_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class SplitFP8Weight(SplitBlocksWeight):
    """A matrix [rows, columns] of whole blocks of F8_E4M3.

    data: [rows, bytes of a row] uint8, blocks of F8_HIGH
    bases: [rows, columns / 128] uint8, the base of each block
    low: [room] uint8, the low bits of the whole matrix
    starts: [rows + 1] int32, index in `low` of the first byte of each row
    first: index in the whole matrix of the first row of this part
    """

    bases: torch.Tensor
    low: torch.Tensor
    starts: torch.Tensor
    first: int = 0

    @property
    def block_type(self) -> BlockType:
        return F8_E4M3

    def rows(self, first: int, end: int) -> SplitFP8Weight:
        """StoredWeight.rows."""
        return replace(
            self,
            data=self.data[first:end],
            bases=self.bases[first:end],
            starts=self.starts[first : end + 1],
            first=self.first + first,
        )

    def write(self, matrix: torch.Tensor) -> None:
        """SplitWeight.write."""
        split_into(matrix, self)

    def join(self) -> torch.Tensor:
        """SplitBlocksWeight.join."""
        return join(self)


class Parts(NamedTuple):
    """Some rows that are split, as in SplitFP8Weight; `starts` begin with 0."""

    data: torch.Tensor
    bases: torch.Tensor
    low: torch.Tensor
    starts: torch.Tensor


def split_into(blocks: torch.Tensor, into: SplitFP8Weight) -> None:
    """Split blocks of F8_E4M3, [rows, bytes of a row] uint8, into these rows of a larger matrix, on
    any device.

    The rows of the larger matrix must be written in ascending order. Raises ValueError, or
    SplitError if there is no room for all low bits, or if a scale is too small.
    """
    rows, columns = into.shape
    right = blocks.shape == (rows, F8_E4M3.row_bytes(columns)) and blocks.dtype == torch.uint8
    require("split_into", right, blocks=blocks, data=into.data)
    if not into.first:
        into.starts[0] = 0
    end, first = int(into.starts[0]), 0
    for some in blocks.split(max(1, _SPLIT_AT_ONCE // columns)):
        last, parts = first + len(some), implementation("split_fp8", some.device)(some)
        into.bases[first:last] = parts.bases
        into.data[first:last] = parts.data
        begin, end = end, end + len(parts.low)
        if end > len(into.low):
            raise SplitError(
                f"the low bits of a matrix take more than {len(into.low)} bytes, which is the room "
                "that the split format has: many numbers are far below the greatest of their block"
            )
        into.low[begin:end] = parts.low
        into.starts[first + 1 : last + 1] = begin + parts.starts[1:]
        first = last


def join(weight: SplitFP8Weight) -> torch.Tensor:
    """Return blocks of F8_E4M3: [rows, bytes of a row] uint8. Raises ValueError."""
    rows, columns = weight.shape
    tensors = weight.data, weight.bases, weight.low, weight.starts
    require(
        "join_fp8",
        weight.data.shape == (rows, F8_HIGH.row_bytes(columns))
        and weight.bases.shape[0] == rows
        and weight.starts.shape == (rows + 1,)
        and (len(weight.low) > 0 or not rows)
        and [part.dtype for part in tensors] == [torch.uint8] * 3 + [torch.int32]
        and all(part.is_contiguous() and part.device == weight.device for part in tensors),
        data=weight.data,
        bases=weight.bases,
        low=weight.low,
        starts=weight.starts,
    )
    return implementation("join_fp8", weight.device)(weight)


def reference_join(weight: SplitFP8Weight) -> torch.Tensor:
    rows, blocks = weight.bases.shape
    high = weight.data.view(rows, blocks, F8_HIGH.nbytes)
    codes, signs = f8_high_parts(high)
    bases = weight.bases.unsqueeze(2)
    lengths = _lengths(codes).flatten(1)
    ends = lengths.cumsum(1)
    places = 8 * weight.starts[:rows].long().unsqueeze(1) + ends - lengths
    most = len(weight.low) - 1
    pairs = (weight.low[(places // 8 + further).clamp(0, most)].int() for further in (0, 1))
    low = next(pairs) | next(pairs) << 8
    low = (low >> places % 8 & (1 << lengths) - 1).to(torch.uint8).view(codes.shape)
    magnitudes = torch.where(
        codes >= 4,
        bases - 3 + (codes >> 2) << 3 | (codes & 3) << 1,
        torch.where(codes >= 2, bases - 3 << 3 | (codes & 1) << 2, bases - 4 << 3),
    )
    magnitudes = torch.where(codes == 0, low, magnitudes | low)
    scales = torch.ldexp(high[..., :4].contiguous().view(torch.float32), SCALED_BASE - bases.int())
    return torch.cat((signs << 7 | magnitudes, scales.view(torch.uint8)), 2).flatten(1)


def reference_split(blocks: torch.Tensor) -> Parts:
    """Split blocks of F8_E4M3, [rows, bytes of a row]. Raises SplitError."""
    parts = blocks.contiguous().view(len(blocks), -1, F8_E4M3.nbytes)
    numbers, scales = parts[..., :_NUMBERS], parts[..., _NUMBERS:].contiguous()
    magnitudes = numbers & 127
    bases = (magnitudes >> 3).amax(2, keepdim=True).clamp_(min=LEAST_BASE)
    codes = _codes(magnitudes, bases)
    data = _high(numbers >> 7, codes, _scaled(scales, bases)).flatten(1)
    low, ends = _packed(magnitudes.flatten(1), codes.flatten(1))
    return Parts(data, bases.squeeze(2), low, F.pad(ends, (1, 0)))


def _codes(magnitudes: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers without their signs, [rows, blocks, 128] uint8."""
    below = bases - (magnitudes >> 3)
    codes = (below == 4).to(torch.uint8)
    codes[below == 3] = 2
    codes += (below == 3) * (magnitudes >> 2 & 1)
    return torch.where(below < 3, (3 - below) * 4 + (magnitudes >> 1 & 3), codes)


def _lengths(codes: torch.Tensor) -> torch.Tensor:
    """Return how many low bits numbers have, int32."""
    return torch.tensor(LOW_BITS, dtype=torch.int32, device=codes.device)[codes.int()]


def _scaled(scales: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
    """Return the scales of the high bits, [rows, blocks, 4] uint8. Raises SplitError."""
    scales, power = scales.view(torch.float32), bases.int() - SCALED_BASE
    scaled = torch.ldexp(scales, power)
    if not torch.equal(torch.ldexp(scaled, -power), scales):
        raise SplitError(CANNOT_SCALE)
    return scaled.view(torch.uint8)


def _high(signs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return blocks of F8_HIGH, [rows, blocks, 84]."""
    bit = torch.arange(8, dtype=torch.uint8, device=codes.device)
    packed = (signs.unflatten(2, (16, 8)) << bit).sum(3, dtype=torch.uint8)
    halves = codes.unflatten(2, (2, 2, 32))
    return torch.cat((scales, packed, (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).flatten(2)), 2)


def _packed(magnitudes: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the low bits of some rows, uint8, and the index of the byte after each row, [rows]."""
    lengths = _lengths(codes)
    ends = lengths.cumsum(1)
    bytes_of = (ends[:, -1:] + 7) // 8
    after = bytes_of.cumsum(0)
    places = 8 * (after - bytes_of) + ends - lengths
    bits = torch.zeros(8 * int(after[-1]), dtype=torch.uint8, device=codes.device)
    for place in range(_MOST_BITS):
        has = lengths > place
        bits[places[has] + place] = magnitudes[has] >> place & 1
    bit = torch.arange(8, dtype=torch.uint8, device=codes.device)
    return (bits.view(-1, 8) << bit).sum(1, dtype=torch.uint8), after.squeeze(1)
