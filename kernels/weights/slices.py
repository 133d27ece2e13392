"""Products with a matrix that is decoded some rows at a time, and the tile size of programs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from triforce_kernels import same_bits
from triforce_kernels.limits import FEW_ROWS


def sliced_product(
    x: torch.Tensor, width: int, slices: Iterable[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """Multiply x [rows, in] by a transposed matrix [width, in], summed in float32: [rows, width] in
    x's dtype. slices: slices of the matrix, each with the index of its first row
    """
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    wide = x.float()
    for first, rows in slices:
        out[:, first : first + rows.shape[0]] = wide @ rows.float().T
    return out


def tile_rows(x: torch.Tensor) -> int:
    """Return how many rows of x a program multiplies at a time: a power of 2. It is always the
    same where a row is to have the same bits beside any others.
    """
    most = most_rows(x)
    if same_bits.wanted():
        return most
    return min(most, max(16, 1 << (x.shape[0] - 1).bit_length()))


def most_rows(x: torch.Tensor) -> int:
    """Return how many rows of x a program multiplies at a time, at most: registers limit them."""
    return FEW_ROWS if x.dtype != torch.float32 else 16
