"""Products with a matrix that is there some rows at a time, and how many rows a program takes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from triforce_kernels.limits import FEW_ROWS


def sliced_product(
    x: torch.Tensor, width: int, slices: Iterable[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """x [rows, in] times a matrix [width, in], transposed, summed in float32: [rows, width] in x's
    dtype. slices: of the matrix, with the index of the first row of each.
    """
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    wide = x.float()
    for first, rows in slices:
        out[:, first : first + rows.shape[0]] = wide @ rows.float().T
    return out


def tile_rows(x: torch.Tensor) -> int:
    """Rows of x that a program multiplies at a time: what its registers hold, and a power of 2."""
    most = FEW_ROWS if x.dtype != torch.float32 else 16
    return min(most, max(16, 1 << (x.shape[0] - 1).bit_length()))
