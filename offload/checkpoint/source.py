"""What every checkpoint format offers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType


class Corner(NamedTuple):
    """Row and column of a tensor where the part of it that is read begins."""

    row: int = 0
    column: int = 0


WHOLE = Corner()


class TensorSource(Protocol):
    """The tensors of a checkpoint, read one at a time."""

    @property
    def files(self) -> Sequence[Path]:
        """That hold them."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in rows-first order, as torch has it. Raises KeyError."""

    def dtype(self, name: str) -> str | None:
        """`float32`, `float16` or `bfloat16`; None for anything else, quantised tensors too."""

    def blocks(self, name: str) -> BlockType | None:
        """The block type that a tensor is stored in, if it is one that formats know."""

    def read_blocks(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        """Writes a matrix's blocks as they are, those from `corner` on: its column begins a block.

        `into`: [rows, bytes of their part of a row] uint8, its first dimension possibly split, or a
        transposed view. Raises CheckpointError.
        """

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        """Writes tensor `name`, or the part of it that begins at `corner`, converting to the dtype
        of `into`, which has the part's shape, possibly with the first dimension split or as a
        transposed view. Raises CheckpointError.
        """

    def close(self) -> None: ...
