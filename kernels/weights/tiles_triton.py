"""The tile of rows that a program multiplies: consecutive ones, or those of an expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv
from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.weights.slices import tile_rows
from triforce_kernels.weights.tiles import Tiles


@triton.jit
def tile_of(order, experts, rows, columns, ROWS: tl.constexpr, GROUPED: tl.constexpr):
    """Return the places of a tile in the result, its rows of x, which of these there are, whether
    there are any, and the row of the weight that is the first column. Programs of all tiles with
    the same columns are launched one after the other, so that these are read from memory once.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if GROUPED:
        row = tl.load(order + place)
        expert = tl.load(experts + tl.program_id(0))
        origin = expert * columns
        some = expert >= 0
    else:
        row = place.to(tl.int64)
        origin = tl.program_id(0).to(tl.int64) * 0
        some = origin == 0
    real = (row >= 0) & (row < rows)
    return place, row, real, some, origin


def launched(
    x: torch.Tensor, weight_rows: int, tiles: Tiles | None, most: int = FEW_ROWS
) -> tuple[int, int, int, tuple]:
    """Return the rows of a tile, the number of tiles, the columns of the product, and what the
    kernel takes as `order` and `experts`.

    weight_rows: number of rows of the weight
    most: rows of a tile, at most
    """
    if tiles is None:
        tile = min(most, tile_rows(x))
        return tile, cdiv(x.shape[0], tile), weight_rows, (x, x)
    return tiles.rows, len(tiles.experts), tiles.columns, (tiles.order, tiles.experts)
