"""Integer weights on a GPU: one program for each tile of rows and columns, group by group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.weights.depth_triton import divided, part_of, steps_together
from triforce_kernels.weights.integers import IntegerWeight
from triforce_kernels.weights.tiles import Tiles
from triforce_kernels.weights.tiles_triton import launched, tile_of


@triton.jit
def _part_of(both, third, part: tl.constexpr, BITS: tl.constexpr):
    """Return the integers of a part of a group: its first or second half with 4 bits, a quarter of
    it with 3.

    both: the bytes of the group that have a part in each of their bits
    third: with 3 bits, the third bits of the part's columns, those of the first quarter lowest
    """
    if BITS == 4:
        number = both & 15 if part == 0 else both >> 4
    else:
        number = (both >> 2 * part & 3) | ((third >> 2 * part & 1) << 2)
    return number


@triton.jit(do_not_specialize=["rows", "places", "each"])
def _matmul_kernel(
    x, order, experts, packed, scale, offset, out, x_row, scale_row, rows, columns, width,
    places, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    GROUPED: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """TOGETHER: groups of a turn of the loop, whose loads do not wait for one another"""
    target, row, real, some, origin = tile_of(order, experts, rows, columns, ROWS, GROUPED)
    if not some:
        return
    parts: tl.constexpr = 2 if BITS == 4 else 4
    size: tl.constexpr = GROUP // parts
    nbytes: tl.constexpr = GROUP * BITS // 8
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    piece = tl.arange(0, size)
    there, column_of = column < columns, column + origin
    left = x + row[:, None] * x_row + piece[None, :]
    place = packed + column_of[:, None] * (width // GROUP * nbytes)
    item = x.dtype.element_ty
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    first, end, out = part_of(out, places, columns, width // GROUP, each)
    for turn in range(first, end, TOGETHER):
        for further in tl.static_range(TOGETHER):
            group = turn + further
            start = place + group * nbytes
            both = tl.load(start + piece[None, :], mask=there[:, None], other=0)
            third = both
            if BITS == 3:
                eighth = start + size + (piece % (size // 2))[None, :]
                third = tl.load(eighth, mask=there[:, None], other=0)
                third = third >> (piece // (size // 2)).to(tl.uint8)[None, :]
            s = tl.load(scale + group * scale_row + column_of, mask=there, other=0.0).to(tl.float32)
            o = tl.load(offset + group * scale_row + column_of, mask=there, other=0.0).to(
                tl.float32
            )
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            whole = tl.zeros([ROWS, size], tl.float32)
            for part in tl.static_range(parts):
                numbers = tl.load(left + group * GROUP + part * size, mask=real[:, None], other=0.0)
                # These integers are exact in every dtype; scale and offset are applied to sums.
                integers = _part_of(both, third, part, BITS)
                sums = tl.dot(numbers, tl.trans(integers.to(item)), sums, input_precision="ieee")
                whole += numbers.to(tl.float32)
            acc += sums * s[None, :] + tl.sum(whole, 1)[:, None] * o[None, :]
    place = out + target[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


def matmul(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """`integers.integer_matmul`."""
    return _product(x, weight, None)


def grouped(x: torch.Tensor, weight: IntegerWeight, tiles: Tiles) -> torch.Tensor:
    """`experts.grouped.product`."""
    return _product(x, weight, tiles)


def _product(x: torch.Tensor, weight: IntegerWeight, tiles: Tiles | None) -> torch.Tensor:
    tile, count, columns, groups = launched(x, weight.shape[0], tiles)
    steps = weight.shape[1] // weight.group
    together = steps_together(tile, steps) if weight.group <= 64 else 1
    parts = divided(x, tiles, tile * count, columns, steps)
    _matmul_kernel[parts.grid(count)](
        x, *groups, weight.packed, weight.scale, weight.offset, parts.sums, x.stride(0),
        weight.scale.stride(0), x.shape[0], columns, weight.shape[1], parts.sums.shape[-2],
        parts.steps,
        ROWS=tile, COLUMNS=parts.columns, GROUP=weight.group, BITS=weight.bits,
        GROUPED=tiles is not None, TOGETHER=together,
        num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return parts.result(x.dtype)
