"""Reading a tensor into a split format, some rows at a time: no matrix is dense as a whole."""

from __future__ import annotations

import torch

from triforce_kernels import limits
from triforce_kernels.weights.stored import SplitWeight
from triforce_offload.checkpoint.source import Corner, TensorSource


def read_split(
    source: TensorSource, name: str, into: SplitWeight, corner: Corner, head_rows: int
) -> None:
    """Writes tensor `name`, or the part of it that begins at `corner`, into high and low bits.

    head_rows: rows of a head, if the file has the halves of each head interleaved; else 0
    Raises CheckpointError, or SplitError.
    """
    unit = head_rows or 1
    step = max(1, limits.DECODED_AT_ONCE // into.shape[1] // unit) * unit
    for first in range(0, into.shape[0], step):
        part = into.rows(first, min(first + step, into.shape[0]))
        dense = torch.empty(part.shape, dtype=into.dtype)
        rows = dense
        if head_rows:
            rows = dense.view(-1, 2, head_rows // 2, part.shape[1]).transpose(1, 2)
        source.read(name, rows, Corner(corner.row + first, corner.column))
        part.write(dense)
