"""Rows of products with experts, in tiles of which each belongs to one expert."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Tiles of rows for matrices that stand one above the other, one for each expert.

    rows: number of rows of a tile
    columns: number of rows of each expert's matrix, which are columns of the product
    order: row of x in each place, [tiles * rows] int64; -1 in places without one
    experts: expert of each tile, [tiles] int64; -1 for tiles without rows
    """

    rows: int
    columns: int
    order: torch.Tensor
    experts: torch.Tensor
