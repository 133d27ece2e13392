"""Rows of a matrix in a file, read as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triforce_offload.checkpoint.opened import OpenedFile

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType


@dataclass(frozen=True)
class StoredRows:
    """A matrix that stays in its file.

    shape: rows and columns
    start: position of its first byte in the file
    row_bytes: bytes of a row
    kind: block type that it is stored in, None for numbers of their own
    dtype: name of the torch dtype of these
    name: its name, for errors
    scale: factor of all numbers
    """

    file: OpenedFile
    shape: tuple[int, int]
    start: int
    row_bytes: int
    kind: BlockType | None
    dtype: str
    name: str
    scale: float = 1.0

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
        numbers = raw.view(getattr(torch, self.dtype))
        if self.scale != 1:
            numbers = numbers.float() * self.scale
        return numbers.to(dtype)[place]

    def _fill(self, into: memoryview, rows: Sequence[int]) -> None:
        size, file = self.row_bytes, self.file
        # A disk reads many rows at the same time, if it knows of all.
        for row in rows:
            file.expect(self.start + row * size, size)
        for index, row in enumerate(rows):
            file.fill(into[index * size : (index + 1) * size], self.start + row * size, self.name)
