"""The interface that every checkpoint format provides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType
    from triforce_offload.checkpoint.rows import StoredRows


class Corner(NamedTuple):
    """Row and column of a tensor at which the part to read begins."""

    row: int = 0
    column: int = 0


WHOLE = Corner()


class TensorSource(Protocol):
    """The tensors of a checkpoint, read one at a time."""

    @property
    def files(self) -> Sequence[Path]:
        """The files that contain the tensors."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in row-major order, as in torch. Raises KeyError."""

    def dtype(self, name: str) -> str | None:
        """Return `float32`, `float16` or `bfloat16`; None for others and for quantised tensors."""

    def blocks(self, name: str) -> BlockType | None:
        """Return the block type that a tensor is stored in; None if it is no known one."""

    def without_effect(self, name: str) -> bool:
        """Return whether a tensor that a model does not expect would change nothing."""

    def read_blocks(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        """Copy a matrix's blocks unchanged, beginning at `corner`, whose column must begin a block.

        into: [rows, bytes of their part of a row] uint8; its first dimension may be split, or it
            may be a transposed view

        Raises CheckpointError.
        """

    def rows(self, name: str) -> StoredRows:
        """Return a matrix that stays in its file. Raises UnsupportedModelError."""

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        """Copy tensor `name`, or the part that begins at `corner`, converted to the dtype of
        `into`.

        into: has the shape of the part; its first dimension may be split, or it may be a transposed
            view

        Raises CheckpointError.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class Transposed:
    """Numbers of a TensorSource, from a corner on, as of transposed matrices."""

    source: TensorSource
    first: Corner

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        """TensorSource.read, in which rows are stored columns."""
        there = Corner(self.first.row + corner.column, self.first.column + corner.row)
        self.source.read(name, into.T, there)
