"""Reads a tensor of a checkpoint into a weight of any format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    columns: Sequence[range] | None = None,
) -> None:
    """Write tensor `name`, or the part of it that begins at `corner`, into a weight.

    order: which row of a head in the file each row of a head is; None for rows as they are
    columns: columns to read, from the corner on, where they do not follow one another

    Raises CheckpointError, or SplitError if the matrix has more exceptions than the split format
    has room for.
    """
    if is_split(into):
        _read_split(source, name, into, corner, order, columns)
    elif isinstance(into, BlockWeight) and into.kind in NARROW.values():
        dtype = next(name for name, kind in NARROW.items() if kind == into.kind)
        numbers = into.data.view(getattr(torch, dtype))
        _read(source.read, name, numbers, corner, columns)
        _reorder(numbers, order)
    elif isinstance(into, BlockWeight):
        block = into.kind.elements, into.kind.nbytes
        _read(source.read_blocks, name, into.data, corner, columns, block)
        _reorder(into.data, order)
    else:
        _read(source.read, name, into, corner, columns)
        _reorder(into, order)


def _read(
    read: Callable[[str, torch.Tensor, Corner], None],
    name: str,
    into: torch.Tensor,
    corner: Corner,
    columns: Sequence[range] | None,
    block: tuple[int, int] = (1, 1),
) -> None:
    """Read a part of a tensor. block: columns of a block, and places in a row of `into`"""
    if columns is None:
        read(name, into, corner)
        return
    elements, places = block
    first = 0
    for each in columns:
        end = first + len(each) // elements * places
        read(name, into[:, first:end], Corner(corner.row, corner.column + each.start))
        first = end


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
    columns: Sequence[range] | None,
) -> None:
    """Do `read_into` some rows at a time, so that the dense matrix never exists as a whole."""
    unit = len(order) if order else 1
    step = max(1, limits.DECODED_AT_ONCE // into.shape[1] // unit) * unit
    for first, part in into.parts(step):
        begin = Corner(corner.row + first, corner.column)
        if (kind := into.block_type) is None:
            numbers = torch.empty(part.shape, dtype=into.dtype)
            _read(source.read, name, numbers, begin, columns)
        else:
            rows, row_bytes = part.shape[0], kind.row_bytes(part.shape[1])
            numbers = torch.empty(rows, row_bytes, dtype=torch.uint8)
            block = kind.elements, kind.nbytes
            _read(source.read_blocks, name, numbers, begin, columns, block)
        _reorder(numbers, order)
        part.write(numbers)
