"""Rows of a matrix in a file, read as they are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triforce_offload.checkpoint.opened import OpenedFile

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType

# A disk answers so many reads at the same time, each of at least so many rows.
_THREADS, _ROWS = 16, 64


@dataclass(frozen=True)
class StoredRows:
    """A matrix that stays in its file.

    shape: rows and columns
    start: position of its first byte in the file
    row_bytes: bytes of a row
    kind: block type that it is stored in, None for numbers of their own
    dtype: name of the torch dtype of these
    name: its name, for errors
    """

    file: OpenedFile
    shape: tuple[int, int]
    start: int
    row_bytes: int
    kind: BlockType | None
    dtype: str
    name: str

    def lookup(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows as numbers, [rows, columns]. Raises CheckpointError.

        rows: [rows] int64 on the host
        """
        import torch

        from triforce_kernels.weights.blocks import decode

        wanted, place = rows.unique(return_inverse=True)
        raw = torch.empty(len(wanted), self.row_bytes, dtype=torch.uint8)
        self._fill(memoryview(raw.view(-1).numpy()), wanted.tolist())
        if self.kind:
            return decode(raw, self.kind, dtype)[place]
        return raw.view(getattr(torch, self.dtype)).to(dtype)[place]

    def _fill(self, into: memoryview, rows: Sequence[int]) -> None:
        step = max(_ROWS, -(-len(rows) // _THREADS))
        parts = range(0, len(rows), step)

        def fill(first: int) -> None:
            size, file = self.row_bytes, self.file
            for index, row in enumerate(rows[first : first + step], first):
                part = into[index * size : (index + 1) * size]
                file.fill(part, self.start + row * size, self.name)

        if len(parts) <= 1:
            for first in parts:
                fill(first)
            return
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1) * 2) as threads:
            list(threads.map(fill, parts))
