"""`grouped` on a GPU: products with dense experts. Those in other formats are in `weights`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv
from triforce_kernels.limits import EXPERT_TILE
from triforce_kernels.weights.tiles import Tiles
from triforce_kernels.weights.tiles_triton import launched, tile_of

# Columns of a program, bytes of a row that a turn of its loop multiplies, and turns that are read
# ahead: with few rows it waits for the weight, and with many it computes.
_FEW_ROWS, _MANY_ROWS = (32, 256, 4), (128, 128, 3)


@triton.jit(do_not_specialize=["rows"])
def _dense_kernel(
    x, order, experts, weight, out, x_row, weight_row, rows, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    target, row, real, some, origin = tile_of(order, experts, rows, columns, ROWS, True)
    if not some:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    # Lanes past the last column read the last column again, and are not stored.
    source = tl.minimum(column, columns - 1) + origin
    right = weight + source[:, None] * weight_row + step[None, :]
    left = x + row[:, None] * x_row + step[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        there = (step + start < depth)[None, :]
        numbers = tl.load(right + start, mask=there, other=0.0)
        own = tl.load(left + start, mask=real[:, None] & there, other=0.0)
        acc = tl.dot(own, tl.trans(numbers), acc, input_precision="ieee")
    place = out + target[:, None].to(tl.int64) * columns + column[None, :]
    mask = real[:, None] & (column < columns)[None, :]
    tl.store(place, acc.to(x.dtype.element_ty), mask=mask)


def dense(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """`grouped.product` for a dense weight of x's dtype."""
    tile, count, columns, groups = launched(x, weight.shape[0], tiles)
    out = torch.empty((tile * count, columns), dtype=x.dtype, device=x.device)
    each, step_bytes, stages = _FEW_ROWS if tile <= EXPERT_TILE else _MANY_ROWS
    _dense_kernel[(count, cdiv(columns, each))](
        x, *groups, weight, out, x.stride(0), weight.stride(0), x.shape[0], columns,
        weight.shape[1], ROWS=tile, COLUMNS=each, DEPTH=step_bytes // x.dtype.itemsize,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out
