"""Tensors of safetensors files that are published in two: small numbers, and their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from triforce_kernels.weights.block_types import BLOCK_TYPES, F8_E4M3
from triforce_offload.checkpoint.source import Corner
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType
    from triforce_offload.checkpoint.opened import Stored

# Suffix of the scales of an FP8 tensor.
SCALE_SUFFIX = "_scale_inv"
_BLOCKS, _EXPONENTS = "_blocks", "_scales"


class Read(Protocol):
    def __call__(
        self, name: str, into: torch.Tensor, corner: Corner, columns: int | None = None
    ) -> None:
        """Read a tensor of the files, or the part that begins at a corner.

        columns: number of its columns, if its last dimension is not a whole row
        """


class Coded(Protocol):
    """A tensor that is made of two of the files.

    kind: block type as which it is read
    parts: names of the two
    """

    kind: ClassVar[BlockType]

    @property
    def parts(self) -> tuple[str, str]: ...

    def shape(self, stored: Mapping[str, Stored], path: Path) -> tuple[int, ...]:
        """Return its shape. Raise UnsupportedModelError or CheckpointError, which name `path`."""

    def read_blocks(self, read: Read, into: torch.Tensor, corner: Corner) -> None:
        """TensorSource.read_blocks."""


@dataclass(frozen=True)
class FP8:
    """Numbers of 8 bits, with a scale for each 128 by 128 of them."""

    kind: ClassVar[BlockType] = F8_E4M3

    name: str

    @property
    def parts(self) -> tuple[str, str]:
        return self.name, self.name + SCALE_SUFFIX

    def shape(self, stored: Mapping[str, Stored], path: Path) -> tuple[int, ...]:
        """Coded.shape."""
        name, scales = self.parts
        shape, size = stored[name].shape, self.kind.elements
        if len(shape) != 2 or shape[1] % size:
            raise UnsupportedModelError(
                f"{path}: {name} is F8_E4M3 of shape {list(shape)}; supported are matrices, one "
                f"a tensor, whose rows are a multiple of {size} numbers"
            )
        expected = (-(-shape[0] // size), shape[1] // size)
        if scales not in stored or stored[scales].shape != expected:
            raise CheckpointError(f"{path}: {scales} is missing or not of shape {list(expected)}")
        return shape

    def read_blocks(self, read: Read, into: torch.Tensor, corner: Corner) -> None:
        """Coded.read_blocks."""
        import torch

        size, (name, scaled) = self.kind.elements, self.parts
        count = into.shape[-1] // self.kind.nbytes
        rows = into.numel() // into.shape[-1]
        numbers = torch.empty(rows, count * size, dtype=torch.float8_e4m3fn)
        read(name, numbers, corner)
        # Scales begin with the row group of the first row; rows of that group above it are cut off
        # below.
        above = corner.row % size
        scales = torch.empty(-(-(above + rows) // size), count)
        read(scaled, scales, Corner(corner.row // size, corner.column // size))
        each = scales.repeat_interleave(size, 0)[above : above + rows]
        made = torch.empty(rows, count, self.kind.nbytes, dtype=torch.uint8)
        made[..., :size] = numbers.view(torch.uint8).unflatten(1, (-1, size))
        made[..., size:] = each.unsqueeze(-1).view(torch.uint8)
        into.copy_(made.flatten(1).view(into.shape))


@dataclass(frozen=True)
class MXFP4:
    """Numbers of 4 bits, those of a pair in one byte, with an exponent for each 32 of them: experts
    of gpt-oss. Blocks of GGUF have the first 16 numbers in the low halves of their bytes.

    name: with what the names of the two tensors begin
    blocks: number of blocks of a row
    """

    kind: ClassVar[BlockType] = BLOCK_TYPES["MXFP4"]

    name: str
    blocks: int

    @property
    def parts(self) -> tuple[str, str]:
        return self.name + _BLOCKS, self.name + _EXPONENTS

    def shape(self, stored: Mapping[str, Stored], path: Path) -> tuple[int, ...]:
        """Coded.shape."""
        numbers, exponents = (stored[part].shape for part in self.parts)
        if numbers != (*exponents, self.kind.elements // 2):
            raise CheckpointError(
                f"{path}: {self.parts[0]} has shape {list(numbers)}, and its exponents have "
                f"{list(exponents)}"
            )
        return (*exponents[:-1], exponents[-1] * self.kind.elements)

    def read_blocks(self, read: Read, into: torch.Tensor, corner: Corner) -> None:
        """Coded.read_blocks."""
        import torch

        size, (blocks, scales) = self.kind.elements, self.parts
        count, first = into.shape[-1] // self.kind.nbytes, corner.column // size
        rows = into.numel() // into.shape[-1]
        exponents = torch.empty(rows, count, dtype=torch.uint8)
        read(scales, exponents, Corner(corner.row, first))
        pairs = torch.empty(rows, count * size // 2, dtype=torch.uint8)
        read(blocks, pairs, Corner(corner.row, first * size // 2), self.blocks * size // 2)
        pairs = pairs.view(rows, count, size // 2)
        numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(2)
        made = torch.empty(rows, count, self.kind.nbytes, dtype=torch.uint8)
        made[..., 0] = exponents
        made[..., 1:] = numbers[..., : size // 2] | numbers[..., size // 2 :] << 4
        into.copy_(made.flatten(1).view(into.shape))


def coded_tensors(stored: Mapping[str, Stored]) -> dict[str, Coded]:
    """Return the tensors that are made of two, by their names."""
    found: dict[str, Coded] = {
        name: FP8(name) for name, each in stored.items() if each.dtype == "F8_E4M3"
    }
    for name, each in stored.items():
        base = name.removesuffix(_BLOCKS)
        exponents = stored.get(base + _EXPONENTS)
        if base != name and each.dtype == "U8" and exponents is not None and exponents.shape:
            found[base] = MXFP4(base, exponents.shape[-1])
    return found
