"""Products with a dense weight whose sums have one order for any number of rows.

A library chooses tiles, and divides the depth among programs, by the number of rows. Here both
follow from the matrix alone (`depth_triton`), and rows are multiplied in tiles of one size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv
from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.weights.depth_triton import divided
from triforce_kernels.weights.slices import most_rows
from triforce_kernels.weights.tiles_triton import tile_of

# Bytes of a row that a turn of the loop multiplies.
_STEP_BYTES = 128
# Columns of a program, for half precision and float32.
_COLUMNS, _WIDE_COLUMNS = 128, 32


@triton.jit(do_not_specialize=["rows", "each"])
def _dense_kernel(
    x, weight, out, x_row, weight_row, rows, columns, depth, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """each: steps of a part of the depth. WHOLE: whether a program adds all parts up, one after the
    other; else it has one of them
    """
    target, _, real, _, _ = tile_of(x, x, rows, columns, ROWS, False)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    # Lanes past the last column read the last column again, and are not stored.
    right = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * weight_row
    left = x + target.to(tl.int64)[:, None] * x_row
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    part = tl.program_id(2)
    last = tl.cdiv(tl.cdiv(depth, DEPTH), each) if WHOLE else part + 1
    while part < last:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(
            part * each * DEPTH, tl.minimum((part + 1) * each * DEPTH, depth), DEPTH
        ):
            place = start + step
            there = (place < depth)[None, :]
            own = tl.load(left + place[None, :], mask=real[:, None] & there, other=0.0)
            numbers = tl.load(right + place[None, :], mask=there, other=0.0)
            acc = tl.dot(own, tl.trans(numbers), acc, input_precision="ieee")
        total += acc
        part += 1
    out += tl.program_id(2).to(tl.int64) * rows * columns
    place = out + target.to(tl.int64)[:, None] * columns + column[None, :]
    mask = real[:, None] & (column < columns)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [rows, in] by a transposed weight [out, in]: [rows, out] in x's dtype."""
    rows, columns, depth = x.shape[0], *weight.shape
    tile, step = most_rows(x), _STEP_BYTES // x.dtype.itemsize
    columns_each = _COLUMNS if x.dtype.itemsize < 4 else _WIDE_COLUMNS
    # With more rows there are enough programs, and the sums of parts would take much memory.
    whole = rows > FEW_ROWS
    parts = divided(x, None, rows, columns, cdiv(depth, step), tile=columns_each, whole=whole)
    _dense_kernel[parts.grid(cdiv(rows, tile))](
        x, weight, parts.sums, x.stride(0), weight.stride(0), rows, columns, depth, parts.steps,
        ROWS=tile, COLUMNS=parts.columns, DEPTH=step, WHOLE=whole, num_warps=4, num_stages=3,
        enable_fp_fusion=False,
    )  # fmt: skip
    return parts.result(x.dtype)
