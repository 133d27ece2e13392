"""`split_bf16` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels import limits
from triforce_kernels.counts import cdiv
from triforce_kernels.weights.depth_triton import divided, part_of
from triforce_kernels.weights.split_bf16 import SplitBF16Weight
from triforce_kernels.weights.split_experts import SplitExpertsWeight
from triforce_kernels.weights.tiles import Tiles
from triforce_kernels.weights.tiles_triton import launched, tile_of

_BYTES = 256
_STEP_BYTES = 128
# Exceptions that a product reads at a time.
_LISTED = 16


@triton.jit
def floor_of(base):
    """Return the lowest power of two that has a code (`split_codes`)."""
    return base.to(tl.int32) - 12


@triton.jit
def number_bits(high_part, low_part, floor):
    """Return the bits of numbers that are not exceptions."""
    code, sign = high_part & 0x7F, (high_part & 0x80) << 8
    above = tl.minimum((code << 4) - 128, (code << 3) + 640) + (floor << 7)
    return tl.where(code < 8, sign, above | low_part | sign)


@triton.jit
def _split_kernel(
    high_part, low_part, base, index, out, columns, HAS_INDEX: tl.constexpr, BYTES: tl.constexpr
):
    target = tl.program_id(0).to(tl.int64)
    row = tl.load(index + target) if HAS_INDEX else target
    half = columns // 2
    column = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    real = column < half
    floor = floor_of(tl.load(base + row))
    low = tl.load(low_part + row * half + column, mask=real, other=0).to(tl.int32)
    first = tl.load(high_part + row * columns + column, mask=real, other=0).to(tl.int32)
    second = tl.load(high_part + row * columns + half + column, mask=real, other=0).to(tl.int32)
    place = out + target * columns + column
    tl.store(place, number_bits(first, low & 15, floor).to(tl.int16), mask=real)
    tl.store(place + half, number_bits(second, low >> 4, floor).to(tl.int16), mask=real)


@triton.jit
def _lower_bound(places, room, wanted):
    """Return the index of the first of ascending places that is not below `wanted`."""
    low = wanted * 0
    high = low + room
    while low < high:
        middle = (low + high) // 2
        below = tl.load(places + middle).to(tl.int64) < wanted
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _exceptions_kernel(places, patterns, index, out, room, columns, first, HAS_INDEX: tl.constexpr):
    target = tl.program_id(0).to(tl.int64)
    row = tl.load(index + target) if HAS_INDEX else target
    start = (row + first) * columns
    entry = _lower_bound(places, room, start)
    end = _lower_bound(places, room, start + columns)
    while entry < end:
        column = tl.load(places + entry).to(tl.int64) - start
        inside = (column >= 0) & (column < columns)
        tl.store(out + target * columns + column, tl.load(patterns + entry), mask=inside)
        entry += 1


@triton.jit(do_not_specialize=["rows", "room", "first", "groups", "outputs", "each"])
def _split_matmul_kernel(
    x, order, experts, high_part, low_part, base, places, patterns, starts, out, x_row, rows,
    columns, depth, room, first, groups, apart, outputs, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LISTED: tl.constexpr,
    START: tl.constexpr, GROUPED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    target, row, exists, any_row, origin = tile_of(order, experts, rows, columns, ROWS, GROUPED)
    if not any_row:
        return
    if APART:
        # Of the expert itself, `apart` bytes from the one before it.
        before = origin // columns * apart
        high_part, low_part, base = high_part + before, low_part + before, base + before
        places, starts = places + before // 4, starts + before // 4
        patterns += before // 2
        origin = origin * 0
    start = tl.program_id(1) * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    half = depth // 2
    # Lanes past the last column read the last column again, and are not stored.
    source = tl.minimum(column, columns - 1) + origin
    floor = floor_of(tl.load(base + source))[:, None]
    high = high_part + source[:, None] * depth + step[None, :]
    low = low_part + source[:, None] * half + step[None, :]
    left = x + row[:, None] * x_row + step[None, :]
    item = x.dtype.element_ty
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    from_step, to_step, out = part_of(out, outputs, columns, tl.cdiv(half, DEPTH), each)
    for begin in range(from_step * DEPTH, to_step * DEPTH, DEPTH):
        real = (step + begin < half)[None, :]
        some = exists[:, None] & real
        nibbles = tl.load(low + begin, mask=real, other=0).to(tl.int32)
        ahead = tl.load(high + begin, mask=real, other=0).to(tl.int32)
        ahead = number_bits(ahead, nibbles & 15, floor).to(tl.int16).to(tl.bfloat16, bitcast=True)
        behind = tl.load(high + begin + half, mask=real, other=0).to(tl.int32)
        behind = number_bits(behind, nibbles >> 4, floor).to(tl.int16).to(tl.bfloat16, bitcast=True)
        one = tl.load(left + begin, mask=some, other=0.0)
        acc = tl.dot(one, tl.trans(ahead.to(item)), acc, input_precision="ieee")
        other = tl.load(left + begin + half, mask=some, other=0.0)
        acc = tl.dot(other, tl.trans(behind.to(item)), acc, input_precision="ieee")
    # Exceptions count as zeros above, and the first part adds them. Those of these columns are
    # consecutive in the list. The range begins and ends with whole groups of rows, because a part
    # of a matrix may begin within a group.
    above = start + first + origin
    behind = tl.minimum((above + COLUMNS - 1) // START + 1, groups)
    entry = tl.maximum(tl.load(starts + above // START), 0)
    end = tl.minimum(tl.load(starts + behind), room)
    end = tl.where(from_step == 0, end, entry)
    while entry < end:
        which = entry + tl.arange(0, LISTED)
        place = tl.load(places + which, mask=which < end, other=0).to(tl.int64)
        place -= above * depth
        listed = (which < end) & (place >= 0) & (place < COLUMNS * depth)
        bits = tl.load(patterns + which, mask=listed, other=0)
        value = bits.to(tl.bfloat16, bitcast=True).to(item)
        there = (place // depth)[:, None] == tl.arange(0, COLUMNS)[None, :]
        sparse = tl.where(there & listed[:, None], value[:, None], 0.0).to(item)
        at = x + row[:, None] * x_row + (place % depth)[None, :]
        some = tl.load(at, mask=exists[:, None] & listed[None, :], other=0.0)
        acc = tl.dot(some, sparse, acc, input_precision="ieee")
        entry += LISTED
    into = out + target[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(into, acc.to(out.dtype.element_ty), mask=exists[:, None] & (column < columns)[None, :])


def matmul(x: torch.Tensor, weight: SplitBF16Weight) -> torch.Tensor:
    """`split_bf16.split_matmul`."""
    return _product(x, weight, None)


def grouped(
    x: torch.Tensor, weight: SplitBF16Weight | SplitExpertsWeight, tiles: Tiles
) -> torch.Tensor:
    """`experts.grouped.product`."""
    if isinstance(weight, SplitBF16Weight):
        return _product(x, weight, tiles)
    return _product(x, weight.expert(0), tiles, weight.apart)


def _product(
    x: torch.Tensor, weight: SplitBF16Weight, tiles: Tiles | None, apart: int = 0
) -> torch.Tensor:
    """apart: bytes from an expert to the next, if the weight is the first one alone"""
    tile, count, columns, groups = launched(x, weight.shape[0], tiles, limits.SPLIT_TILE)
    depth = _STEP_BYTES // x.dtype.itemsize
    steps = cdiv(weight.shape[1] // 2, depth)
    parts = divided(x, tiles, tile * count, columns, steps)
    _split_matmul_kernel[parts.grid(count)](
        x, *groups, weight.high, weight.low, weight.base, weight.places, weight.patterns,
        weight.starts, parts.sums, x.stride(0), x.shape[0], columns, weight.shape[1],
        len(weight.places), weight.first, len(weight.starts) - 1, apart,
        parts.sums.shape[-2], parts.steps, GROUPED=tiles is not None, APART=apart > 0,
        ROWS=tile, COLUMNS=parts.columns, DEPTH=depth, LISTED=_LISTED, START=limits.ROWS_OF_A_START,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.result(x.dtype)


def decode(weight: SplitBF16Weight, index: torch.Tensor | None) -> torch.Tensor:
    """`split_bf16.decode_rows`; without an index, of all rows."""
    rows, columns = weight.shape
    rows = rows if index is None else len(index)
    out = torch.empty((rows, columns), dtype=torch.int16, device=weight.device)
    if not rows:
        return out.view(torch.bfloat16)
    which = weight.base if index is None else index
    named = {"HAS_INDEX": index is not None}
    _split_kernel[(rows, cdiv(columns // 2, _BYTES))](
        weight.high, weight.low, weight.base, which, out, columns, BYTES=_BYTES, **named
    )
    _exceptions_kernel[(rows,)](
        weight.places, weight.patterns, which, out, len(weight.places), columns, weight.first,
        num_warps=1, **named,
    )  # fmt: skip
    return out.view(torch.bfloat16)
