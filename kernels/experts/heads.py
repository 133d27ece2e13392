"""Products of which each head has a matrix of its own (latent attention; DeepSeek-V2, 2024)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triforce_kernels.checks import require
from triforce_kernels.counts import cdiv
from triforce_kernels.dispatch import REFERENCE, TRITON, backend
from triforce_kernels.experts.grouped import kernel_of, product, rows_of_tile
from triforce_kernels.limits import EXPERT_TILE, FEW_ROWS
from triforce_kernels.weights.linear import Weight, linear, rows_of
from triforce_kernels.weights.tiles import Tiles


class HeadTiles(NamedTuple):
    """`Tiles` of the vectors of rows, head after head: `order` is of [rows * heads, in]."""

    rows: int
    order: torch.Tensor
    experts: torch.Tensor

    @classmethod
    def of(cls, rows: int, heads: int, device: torch.device, tile: int = EXPERT_TILE) -> HeadTiles:
        """tile: rows of a tile"""
        tiles = cdiv(rows, tile)
        row = torch.arange(tiles * tile, device=device)
        order = row * heads + torch.arange(heads, device=device).unsqueeze(1)
        order = order.masked_fill_(row >= rows, -1).flatten()
        return cls(tile, order, torch.arange(heads, device=device).repeat_interleave(tiles))


def by_heads(x: torch.Tensor, weight: Weight, tiles: HeadTiles | None = None) -> torch.Tensor:
    """Multiply the vectors of each head by its own transposed matrix: [rows, heads, out].

    x: [rows, heads, in]
    weight: [heads * out, in], the matrices one above the other
    tiles: of these rows and heads, if they are at hand

    Heads are to few rows what experts are that every row chose. Raises ValueError.
    """
    rows, heads, size = x.shape
    require(
        "by_heads",
        weight.shape[0] % heads == 0 and weight.shape[1] == size,
        x=x,
        weight=weight.shape,
    )
    if backend(x.device) == REFERENCE or x.dtype == torch.float64 or kernel_of(weight) is None:
        return _one_by_one(x, weight)
    if rows <= FEW_ROWS or backend(x.device) == TRITON:
        return _in_tiles(x, weight, tiles)
    return _one_by_one(x, weight)


def _in_tiles(x: torch.Tensor, weight: Weight, tiles: HeadTiles | None) -> torch.Tensor:
    rows, heads, _ = x.shape
    columns = weight.shape[0] // heads
    tiles = tiles or HeadTiles.of(rows, heads, x.device, rows_of_tile(x, [weight], rows))
    chosen = Tiles(tiles.rows, columns, tiles.order, tiles.experts)
    out = product(x.flatten(0, 1), weight, chosen)
    return out.view(heads, -1, columns)[:, :rows].transpose(0, 1)


def _one_by_one(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    rows, heads, _ = x.shape
    columns = weight.shape[0] // heads
    out = x.new_empty(rows, heads, columns)
    for head in range(heads):
        own = rows_of(weight, head * columns, (head + 1) * columns)
        out[:, head] = linear(x[:, head].contiguous(), own)
    return out
