"""bfloat16 matrices in 12 bits per number, bit for bit, whose high 8 bits are a number by
themselves.

Numbers are encoded as in `split_codes`, with a base for each row. A list has the places of
exceptions and their 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch

from triforce_kernels import limits
from triforce_kernels.checks import require
from triforce_kernels.dispatch import REFERENCE, TRITON, backend, implementation
from triforce_kernels.weights.slices import sliced_product
from triforce_kernels.weights.split_codes import (
    EXCEPTION,
    add_low,
    base_of,
    high_bits,
    high_codes,
    low_codes,
)
from triforce_kernels.weights.stored import SplitWeight, StoredWeight

# Fills a list after its last exception.
NOTHING = 2**31 - 1
# Numbers that are encoded at a time: the temporaries stay in a processor's cache.
_CODED_AT_ONCE = 1 << 17


class SplitError(ValueError):
    """A matrix does not fit its split format, or a list of exceptions is damaged."""


@dataclass(frozen=True)
class CodedMatrix(StoredWeight):
    """The part of a split matrix [rows, columns] that every way to read it needs.

    high: [rows, columns] uint8
    base: [rows] uint8, the greatest exponent of each row's finite numbers
    """

    high: torch.Tensor
    base: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.high.shape[0], self.high.shape[1]

    @property
    def device(self) -> torch.device:
        return self.high.device

    def rows(self, first: int, end: int) -> Self:
        """StoredWeight.rows."""
        return replace(self, high=self.high[first:end], base=self.base[first:end])

    @property
    def decoded_at_once(self) -> int:
        """Count of numbers that are decoded at a time."""
        return limits.DECODED_AT_ONCE

    def slices(self) -> Iterator[tuple[int, Self]]:
        """Yield as many rows as are decoded at a time, each time with the index of the first."""
        step = max(1, self.decoded_at_once // self.shape[1])
        for first in range(0, self.shape[0], step):
            yield first, self.rows(first, min(first + step, self.shape[0]))


@dataclass(frozen=True)
class SplitBF16Weight(CodedMatrix, SplitWeight):
    """A matrix [rows, columns] of bfloat16 with an even number of columns.

    low: [rows, columns / 2] uint8; the first half of a row is in the low 4 bits
    places: [room] int32, places of exceptions in the whole matrix, ascending, then NOTHING
    patterns: [room] int16, the bits of exceptions
    starts: [ceil(rows of the whole matrix / 32) + 1] int32, index of the first exception of each 32
        rows (`limits.ROWS_OF_A_START`), then the number of exceptions
    first: index in the whole matrix of the first row of this part
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    low: torch.Tensor
    places: torch.Tensor
    patterns: torch.Tensor
    starts: torch.Tensor
    first: int = 0

    def rows(self, first: int, end: int) -> SplitBF16Weight:
        """StoredWeight.rows."""
        part = super().rows(first, end)
        return replace(part, low=self.low[first:end], first=self.first + first)

    @property
    def decoded_at_once(self) -> int:
        return joined_at_once(self.device)

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        for first, part in self.slices():
            yield first, decode(part).to(dtype)

    def lookup(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """StoredWeight.lookup."""
        return decode_rows(self, index).to(dtype)

    def small_batch_matmul(self) -> Callable[[torch.Tensor, SplitBF16Weight], torch.Tensor] | None:
        """StoredWeight.small_batch_matmul. None without a kernel: the reference decodes too."""
        return split_matmul if backend(self.device) != REFERENCE else None

    @property
    def experts_kernel(self) -> str:
        """StoredWeight.experts_kernel."""
        return "split_experts"

    @property
    def most_tile_rows(self) -> int:
        """StoredWeight.most_tile_rows."""
        return limits.SPLIT_TILE

    def joined(self) -> torch.Tensor:
        """SplitWeight.joined."""
        return decode(self)

    def write(self, matrix: torch.Tensor) -> None:
        """SplitWeight.write. Raise SplitError for more exceptions than there is room for."""
        encode_into(matrix, self)


def joined_at_once(device: torch.device) -> int:
    """Return how many numbers of a split matrix are joined at a time for a product."""
    by_kernel = device.type == "cuda" and backend(device) == TRITON
    return limits.SPLIT_AT_ONCE_ON_GPU if by_kernel else limits.DECODED_AT_ONCE


class _Coded(NamedTuple):
    """Some encoded rows.

    places: places of their exceptions, int64, counted from the first of these rows
    """

    high: torch.Tensor
    low: torch.Tensor
    base: torch.Tensor
    places: torch.Tensor
    patterns: torch.Tensor


def encode(matrix: torch.Tensor) -> SplitBF16Weight:
    """Encode a bfloat16 matrix [rows, columns], with exactly the room that its exceptions take.

    Raises ValueError.
    """
    parts = [_code(part) for part in _slices(matrix)]
    above = torch.tensor([0, *(part.high.numel() for part in parts)]).cumsum(0).tolist()
    places = [part.places + before for part, before in zip(parts, above, strict=False)]
    listed = torch.cat(places).int()
    groups = -(-matrix.shape[0] // limits.ROWS_OF_A_START)
    return SplitBF16Weight(
        torch.cat([part.high for part in parts]),
        torch.cat([part.base for part in parts]),
        torch.cat([part.low for part in parts]),
        listed,
        torch.cat([part.patterns for part in parts]),
        _starts(listed, groups + 1, matrix.shape[1]),
    )


def encode_into(matrix: torch.Tensor, into: SplitBF16Weight) -> None:
    """Encode a bfloat16 matrix [rows, columns] into these rows of a larger one, on any device.

    The rows of the larger matrix must be written in ascending order: exceptions of later rows are
    dropped. Raises ValueError, or SplitError for more exceptions than there is room for.
    """
    columns, row = matrix.shape[1], 0
    if matrix.shape != into.shape:
        raise ValueError(f"encode_into of {tuple(matrix.shape)} into {into.shape}")
    place = into.first * columns
    # Before the first rows are written the list may contain anything.
    known = int(torch.searchsorted(into.places, place)) if into.first else 0
    into.places[known:] = NOTHING
    for part in _slices(matrix):
        coded, end = _code(part), row + part.shape[0]
        into.high[row:end] = coded.high
        into.low[row:end] = coded.low
        into.base[row:end] = coded.base
        known_then = known + len(coded.places)
        if known_then > len(into.places):
            raise SplitError(
                f"more than {len(into.places)} numbers of a matrix are far below the greatest of "
                "their row, which is what the split format has room for"
            )
        into.places[known:known_then] = (coded.places + place).int()
        into.patterns[known:known_then] = coded.patterns
        known, row, place = known_then, end, place + part.numel()
    into.starts.copy_(_starts(into.places, len(into.starts), columns))


def decode(weight: SplitBF16Weight) -> torch.Tensor:
    """Return the matrix [rows, columns] in bfloat16. Raises ValueError."""
    _require("decode", weight)
    return implementation("decode_split", weight.device)(weight, None)


def decode_rows(weight: SplitBF16Weight, index: torch.Tensor) -> torch.Tensor:
    """Return rows of the matrix by index [n] int64: [n, columns] bfloat16. Raises ValueError."""
    _require("decode_rows", weight)
    return implementation("decode_split", weight.device)(weight, index)


def split_matmul(x: torch.Tensor, weight: SplitBF16Weight) -> torch.Tensor:
    """Multiply x [rows, in] by the transposed weight: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, up to about 64, where reading the weight takes most of the time. Raises
    ValueError.
    """
    _require("split_matmul", weight)
    require(
        "split_matmul",
        x.dim() == 2
        and x.shape[0] > 0
        and x.shape[1] == weight.shape[1]
        and x.stride(1) == 1
        and x.device == weight.device,
        x=x,
        high=weight.high,
    )
    return implementation("split_matmul", x.device)(x, weight)


def check(weight: SplitBF16Weight) -> None:
    """Raise SplitError unless the exceptions of a whole matrix match its codes and its `starts`."""
    coded = (weight.high == EXCEPTION).flatten().nonzero().squeeze(1)
    places = weight.places
    if (
        not torch.equal(places[: len(coded)].long(), coded)
        or (places[len(coded) :] < NOTHING).any()
        or not torch.equal(weight.starts, _starts(places, len(weight.starts), weight.shape[1]))
    ):
        raise SplitError(
            f"a list of {int((places != NOTHING).sum())} exceptions is not that of the "
            f"{len(coded)} numbers that are coded as such"
        )


def reference_decode(weight: SplitBF16Weight, index: torch.Tensor | None) -> torch.Tensor:
    high, low, base = weight.high, weight.low, weight.base
    if index is None:
        index = torch.arange(weight.shape[0], device=weight.device)
    else:
        high, low, base = high[index], low[index], base[index]
    bits = high_bits(high, base.unsqueeze(1))
    add_low(bits, low)
    _put_exceptions(bits, weight, index)
    return bits.view(torch.bfloat16)


def reference_matmul(x: torch.Tensor, weight: SplitBF16Weight) -> torch.Tensor:
    return sliced_product(x, weight.shape[0], ((i, decode(part)) for i, part in weight.slices()))


def _require(kernel: str, weight: SplitBF16Weight) -> None:
    rows, columns = weight.shape
    numbers, listed = (weight.high, weight.low, weight.base), (weight.places, weight.starts)
    tensors = (*numbers, *listed, weight.patterns)
    kinds = [torch.uint8] * 3 + [torch.int32] * 2 + [torch.int16]
    require(
        kernel,
        columns % 2 == 0
        and weight.low.shape == (rows, columns // 2)
        and weight.base.shape == (rows,)
        and weight.places.shape == weight.patterns.shape
        and (weight.first + rows - 1) // limits.ROWS_OF_A_START + 1 < len(weight.starts)
        and [part.dtype for part in tensors] == kinds
        and all(part.is_contiguous() and part.device == weight.device for part in tensors),
        high=weight.high,
        low=weight.low,
        base=weight.base,
        places=weight.places,
        patterns=weight.patterns,
        starts=weight.starts,
    )


def _slices(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    require(
        "encode",
        matrix.dim() == 2
        and matrix.dtype == torch.bfloat16
        and matrix.shape[1] % 2 == 0
        and matrix.numel() < NOTHING,
        matrix=matrix,
    )
    return matrix.split(max(1, _CODED_AT_ONCE // matrix.shape[1]))


def _code(matrix: torch.Tensor) -> _Coded:
    bits = matrix.contiguous().view(torch.int16)
    base = base_of(bits, 1)
    high, outside = high_codes(bits, base)
    return _Coded(
        high,
        low_codes(bits),
        base.squeeze(1).to(torch.uint8),
        outside.flatten().nonzero().squeeze(1),
        bits[outside],
    )


def _starts(places: torch.Tensor, count: int, columns: int) -> torch.Tensor:
    """Return SplitBF16Weight.starts, `count` of them, for the places of exceptions."""
    rows = torch.arange(count, device=places.device) * limits.ROWS_OF_A_START
    # Past the last row this gives the number of exceptions.
    wanted = (rows * columns).clamp_(max=NOTHING).int()
    return torch.searchsorted(places, wanted, out_int32=True)


def _put_exceptions(bits: torch.Tensor, weight: SplitBF16Weight, index: torch.Tensor) -> None:
    """Write the listed exceptions of some rows. A damaged list cannot make it write elsewhere."""
    columns = bits.shape[1]
    rows = (index + weight.first) * columns
    begin = torch.searchsorted(weight.places, rows.int())
    counts = (torch.searchsorted(weight.places, (rows + columns).int()) - begin).clamp_(min=0)
    total = int(counts.sum())
    if not total:
        return
    which = torch.arange(len(index), device=bits.device).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts)[which]
    entry = torch.arange(total, device=bits.device) - before + begin[which]
    column = (weight.places[entry] - rows[which]).clamp(0, columns - 1)
    bits[which, column] = weight.patterns[entry]
