"""`high_bits` on a GPU: products with few rows that read one byte of each number of the weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv
from triforce_kernels.weights.depth_triton import divided, part_of
from triforce_kernels.weights.high_bits import HighBitsWeight
from triforce_kernels.weights.split_bf16_triton import floor_of
from triforce_kernels.weights.tiles import Tiles
from triforce_kernels.weights.tiles_triton import launched, tile_of

_STEP_BYTES = 256


@triton.jit(do_not_specialize=["rows", "places", "each"])
def _high_bits_kernel(
    x, order, experts, high_part, base, out, x_row, rows, columns, depth, places, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    target, row, there, some, origin = tile_of(order, experts, rows, columns, ROWS, GROUPED)
    if not some:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    # Lanes past the last column read the last column again, and are not stored.
    source = tl.minimum(column, columns - 1) + origin
    floor = (floor_of(tl.load(base + source)) << 7)[:, None]
    weight = high_part + source[:, None] * depth + step[None, :]
    left = x + row[:, None] * x_row + step[None, :]
    item = x.dtype.element_ty
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin, end, out = part_of(out, places, columns, tl.cdiv(depth, DEPTH), each)
    for start in range(begin * DEPTH, end * DEPTH, DEPTH):
        real = step + start < depth
        coded = tl.load(weight + start, mask=real[None, :], other=0).to(tl.int32)
        # In the middle of the range of the low bits.
        code = coded & 0x7F
        above = tl.minimum((code << 4) - 120, (code << 3) + 644) + floor
        bits = tl.where(code < 8, 0, above | ((coded & 0x80) << 8))
        number = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        rows_of_x = tl.load(left + start, mask=there[:, None] & real[None, :], other=0.0)
        acc = tl.dot(rows_of_x, tl.trans(number.to(item)), acc, input_precision="ieee")
    place = out + target[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=there[:, None] & (column < columns)[None, :])


def matmul(x: torch.Tensor, weight: HighBitsWeight) -> torch.Tensor:
    """`high_bits.high_bits_matmul`."""
    return _product(x, weight, None)


def grouped(x: torch.Tensor, weight: HighBitsWeight, tiles: Tiles) -> torch.Tensor:
    """`experts.grouped.product`."""
    return _product(x, weight, tiles)


def _product(x: torch.Tensor, weight: HighBitsWeight, tiles: Tiles | None) -> torch.Tensor:
    tile, count, columns, groups = launched(x, weight.shape[0], tiles)
    depth = _STEP_BYTES // x.dtype.itemsize
    steps = cdiv(weight.shape[1], depth)
    parts = divided(x, tiles, tile * count, columns, steps)
    _high_bits_kernel[parts.grid(count)](
        x, *groups, weight.high, weight.base, parts.sums, x.stride(0), x.shape[0], columns,
        weight.shape[1], parts.sums.shape[-2], parts.steps, GROUPED=tiles is not None, ROWS=tile,
        COLUMNS=parts.columns, DEPTH=depth, num_warps=4, num_stages=3,
    )  # fmt: skip
    return parts.result(x.dtype)
