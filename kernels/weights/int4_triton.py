"""`int4` on a GPU: one program for each tile of rows and columns, group by group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.weights.depth_triton import divided, part_of, steps_together
from triforce_kernels.weights.int4 import Int4Weight
from triforce_kernels.weights.tiles import Tiles
from triforce_kernels.weights.tiles_triton import launched, tile_of


@triton.jit(do_not_specialize=["rows", "places", "each"])
def _matmul_kernel(
    x, order, experts, packed, scale, offset, out, x_row, scale_row, rows, columns, width,
    places, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """TOGETHER: groups of a turn of the loop, whose loads do not wait for one another"""
    target, row, real, some, origin = tile_of(order, experts, rows, columns, ROWS, GROUPED)
    if not some:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    half = tl.arange(0, GROUP // 2)
    there, column_of = column < columns, column + origin
    left = x + row[:, None] * x_row + half[None, :]
    place = packed + column_of[:, None] * (width // 2) + half[None, :]
    item = x.dtype.element_ty
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    first, end, out = part_of(out, places, columns, width // GROUP, each)
    for turn in range(first, end, TOGETHER):
        for further in tl.static_range(TOGETHER):
            group = turn + further
            low_x = tl.load(left + group * GROUP, mask=real[:, None], other=0.0)
            high_x = tl.load(left + group * GROUP + GROUP // 2, mask=real[:, None], other=0.0)
            both = tl.load(place + group * (GROUP // 2), mask=there[:, None], other=0)
            s = tl.load(scale + group * scale_row + column_of, mask=there, other=0.0).to(tl.float32)
            o = tl.load(offset + group * scale_row + column_of, mask=there, other=0.0).to(
                tl.float32
            )
            # Integers up to 15 are exact in every dtype; scale and offset are applied to sums.
            low = tl.trans((both & 15).to(item))
            high = tl.trans((both >> 4).to(item))
            sums = tl.dot(low_x, low, input_precision="ieee")
            sums = tl.dot(high_x, high, sums, input_precision="ieee")
            whole = tl.sum(low_x.to(tl.float32), 1) + tl.sum(high_x.to(tl.float32), 1)
            acc += sums * s[None, :] + whole[:, None] * o[None, :]
    place = out + target[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


def matmul(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """`int4.int4_matmul`."""
    return _product(x, weight, None)


def grouped(x: torch.Tensor, weight: Int4Weight, tiles: Tiles) -> torch.Tensor:
    """`experts.grouped.product`."""
    return _product(x, weight, tiles)


def _product(x: torch.Tensor, weight: Int4Weight, tiles: Tiles | None) -> torch.Tensor:
    tile, count, columns, groups = launched(x, weight.shape[0], tiles)
    steps = weight.shape[1] // weight.group
    together = steps_together(tile, steps) if weight.group <= 64 else 1
    parts = divided(x, tiles, tile * count, columns, steps)
    _matmul_kernel[parts.grid(count)](
        x, *groups, weight.packed, weight.scale, weight.offset, parts.sums, x.stride(0),
        weight.scale.stride(0), x.shape[0], columns, weight.shape[1], parts.sums.shape[-2],
        parts.steps,
        ROWS=tile, COLUMNS=parts.columns, GROUP=weight.group, GROUPED=tiles is not None,
        TOGETHER=together, num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return parts.result(x.dtype)
