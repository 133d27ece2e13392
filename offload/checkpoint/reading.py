"""Reads a tensor of a checkpoint into a weight of any format."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_kernels import limits
from triforce_kernels.weights.block_types import NARROW
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.linear import Weight
from triforce_kernels.weights.stored import SplitWeight, is_split
from triforce_offload.checkpoint.source import Corner, TensorSource


def read_into(
    source: TensorSource,
    name: str,
    into: Weight,
    corner: Corner,
    order: Sequence[int] | None = None,
) -> None:
    """Write tensor `name`, or the part of it that begins at `corner`, into a weight.

    order: which row of a head in the file each row of a head is; None for rows as they are

    Raises CheckpointError, or SplitError if the matrix has more exceptions than the split format
    has room for.
    """
    if is_split(into):
        _read_split(source, name, into, corner, order)
    elif isinstance(into, BlockWeight) and into.kind in NARROW.values():
        dtype = next(name for name, kind in NARROW.items() if kind == into.kind)
        numbers = into.data.view(getattr(torch, dtype))
        source.read(name, numbers, corner)
        _reorder(numbers, order)
    elif isinstance(into, BlockWeight):
        source.read_blocks(name, into.data, corner)
        _reorder(into.data, order)
    else:
        source.read(name, into, corner)
        _reorder(into, order)


def _reorder(rows: torch.Tensor, order: Sequence[int] | None) -> None:
    """Reorder the rows of each head, [heads * rows of a head, ...], in place."""
    if order is not None:
        # One head at a time, for the memory of one.
        for head in rows.unflatten(0, (-1, len(order))):
            head.copy_(head[list(order)])


def _read_split(
    source: TensorSource,
    name: str,
    into: SplitWeight,
    corner: Corner,
    order: Sequence[int] | None,
) -> None:
    """Do `read_into` some rows at a time, so that the dense matrix never exists as a whole."""
    unit = len(order) if order else 1
    step = max(1, limits.DECODED_AT_ONCE // into.shape[1] // unit) * unit
    for first in range(0, into.shape[0], step):
        part = into.rows(first, min(first + step, into.shape[0]))
        dense = torch.empty(part.shape, dtype=into.dtype)
        source.read(name, dense, Corner(corner.row + first, corner.column))
        _reorder(dense, order)
        part.write(dense)
