"""Products whose depth, the inner dimension, is divided among programs, so that they fill a GPU.

A program of a product waits for memory most of the time, and a matrix with few columns has few of
them. So several programs add up the products of parts of the depth, and their sums are added in the
order of the parts. How many there are depends on the matrix, and not on the rows: among tiles of
one size, a row's result has the same bits whatever rows are beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv
from triforce_kernels.limits import EXPERT_TILE
from triforce_kernels.weights.tiles import Tiles

# Programs of a product, if its matrix has fewer tiles of columns. A part's sums of a row take 4
# bytes for each column, which is less than decoding the weight would take.
PROGRAMS = 1024
_MOST_PARTS = 16
_SUMMED = 256
# Columns of a program, and of one that would need more registers than there are.
_COLUMNS, _FEW_COLUMNS = 64, 32


class Parts(NamedTuple):
    """How a product is divided among programs.

    columns: columns of a program
    count: number of parts of the depth, each of which has programs of its own
    steps: number of steps of the depth in each part but the last
    sums: what the programs write: the result itself, or [count, *result] in float32
    """

    columns: int
    count: int
    steps: int
    sums: torch.Tensor

    def grid(self, tiles: int) -> tuple[int, int, int]:
        """Return the grid of programs of a product with `tiles` tiles of rows."""
        return tiles, cdiv(self.sums.shape[-1], self.columns), self.count

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the result [rows, columns] once the programs were launched."""
        if self.count == 1:
            return self.sums
        out = torch.empty(self.sums.shape[1:], dtype=dtype, device=self.sums.device)
        _sum_kernel[(cdiv(out.numel(), _SUMMED),)](
            self.sums, out, out.numel(), COUNT=self.count, SIZE=_SUMMED, num_warps=2
        )
        return out


def divided(
    x: torch.Tensor,
    tiles: Tiles | None,
    tile_rows: int,
    columns: int,
    steps: int,
    *,
    tile: int | None = None,
    whole: bool = False,
) -> Parts:
    """Divide a product with the rows of x. Products with experts have one part: they have enough
    programs, of few columns each if the tiles are small.

    tile_rows: rows of all tiles
    columns: of the result
    steps: number of steps of the depth
    tile: columns of a program; None if its kernel decodes the weight
    whole: whether each program adds all parts up, so that their sums take no memory
    """
    if tile is None:
        few = x.dtype.itemsize == 4 or (tiles is not None and tiles.rows <= EXPERT_TILE)
        tile = _FEW_COLUMNS if few else _COLUMNS
    if tiles is None:
        rows, wanted = x.shape[0], min(_MOST_PARTS, PROGRAMS // cdiv(columns, _COLUMNS))
    else:
        rows, wanted = tile_rows, 1
    # Parts end with turns of any tile, so they do not depend on the rows.
    turn = steps_together(1, steps)
    each = turn * cdiv(steps // turn, max(1, wanted))
    count = 1 if whole else cdiv(steps, each)
    if count == 1:
        sums = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    else:
        sums = torch.empty((count, rows, columns), dtype=torch.float32, device=x.device)
    return Parts(tile, count, each, sums)


def steps_together(tile: int, steps: int) -> int:
    """Return how many steps of 64 numbers a turn of a program's loop has: as many as fit in shared
    memory with the rows of a tile, so that a turn waits for memory once.
    """
    together = 2 if tile > 32 else 4
    return next(n for n in (together, 2, 1) if steps % n == 0)


@triton.jit
def part_of(out, rows, columns, steps, each):
    """Return the first step of a program's part, the step after its last one, and where the part's
    result [rows, columns] is.
    """
    part = tl.program_id(2)
    first = part * each
    return first, tl.minimum(first + each, steps), out + part.to(tl.int64) * rows * columns


@triton.jit(do_not_specialize=["numbers"])
def _sum_kernel(sums, out, numbers, COUNT: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    real = place < numbers
    total = tl.load(sums + place, mask=real, other=0.0)
    for part in tl.static_range(1, COUNT):
        total += tl.load(sums + part * numbers.to(tl.int64) + place, mask=real, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real)
