"""What every checkpoint format offers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from triforce_kernels.block_types import BlockType


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

    def read_blocks(self, name: str, into: torch.Tensor) -> None:
        """Writes a tensor's blocks as they are into `into` [rows, bytes of a row] uint8, its first
        dimension possibly split, or a transposed view.
        """

    def read(self, name: str, into: torch.Tensor) -> None:
        """Writes tensor `name` into `into`, converting to its dtype.

        `into` has the same elements in the same order, possibly with the first dimension split or
        as a transposed view. Raises CheckpointError.
        """

    def close(self) -> None: ...
