"""Reads a tensor of a checkpoint into a weight of any format."""

from __future__ import annotations

import torch

from triforce_kernels import limits
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.linear import Weight
from triforce_kernels.weights.stored import SplitWeight, is_split
from triforce_offload.checkpoint.source import Corner, TensorSource


def read_into(
    source: TensorSource, name: str, into: Weight, corner: Corner, head_rows: int = 0
) -> None:
    """Write tensor `name`, or the part of it that begins at `corner`, into a weight.

    head_rows: number of rows of a head, if the file has the halves of each head interleaved; else 0

    Raises CheckpointError, or SplitError if the matrix has more exceptions than the split format
    has room for.
    """
    if is_split(into):
        _read_split(source, name, into, corner, head_rows)
    elif isinstance(into, BlockWeight):
        source.read_blocks(name, _halves_apart(into.data, head_rows), corner)
    else:
        source.read(name, _halves_apart(into, head_rows), corner)


def _halves_apart(rows: torch.Tensor, head_rows: int) -> torch.Tensor:
    """Return a view of [heads * head_rows, ...] in the order of a file that interleaves halves."""
    if not head_rows:
        return rows
    return rows.unflatten(0, (-1, 2, head_rows // 2)).transpose(1, 2)


def _read_split(
    source: TensorSource, name: str, into: SplitWeight, corner: Corner, head_rows: int
) -> None:
    """Do `read_into` some rows at a time, so that the dense matrix never exists as a whole."""
    unit = head_rows or 1
    step = max(1, limits.DECODED_AT_ONCE // into.shape[1] // unit) * unit
    for first in range(0, into.shape[0], step):
        part = into.rows(first, min(first + step, into.shape[0]))
        dense = torch.empty(part.shape, dtype=into.dtype)
        rows = _halves_apart(dense, head_rows)
        source.read(name, rows, Corner(corner.row + first, corner.column))
        part.write(dense)
