"""What a quantised tensor provides, whose parts are several tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from triforce_offload.checkpoint.source import Corner
from triforce_offload.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType
    from triforce_offload.checkpoint.opened import Stored


class Read(Protocol):
    def __call__(
        self, name: str, into: torch.Tensor, corner: Corner, columns: int | None = None
    ) -> None:
        """Read a tensor of the files, or the part that begins at a corner.

        columns: number of its columns, if its last dimension is not a whole row
        """


class QuantisedTensor(Protocol):
    """A tensor that is made of several of the files.

    kind: block type as which it is read
    parts: names of all of them, that of the numbers first
    """

    @property
    def kind(self) -> BlockType: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    def shape(self, stored: Mapping[str, Stored], path: Path) -> tuple[int, ...]:
        """Return its shape. Raise UnsupportedModelError or CheckpointError, which name `path`."""

    def read_blocks(self, read: Read, into: torch.Tensor, corner: Corner) -> None:
        """TensorSource.read_blocks."""


def check_dtype(
    name: str, stored: Mapping[str, Stored], path: Path, supported: Sequence[str]
) -> None:
    """Raise UnsupportedModelError if a part of a tensor has another dtype than these."""
    if (dtype := stored[name].dtype) not in supported:
        raise UnsupportedModelError(
            f"{path}: {name} is {dtype}; supported are {', '.join(supported)}"
        )
