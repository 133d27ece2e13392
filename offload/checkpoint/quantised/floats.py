"""Matrices of safetensors files in floats of 8 and 4 bits: small numbers, and their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from triforce_kernels.weights.block_types import BLOCK_TYPES, F8_E4M3, NVFP4
from triforce_offload.checkpoint.quantised.tensor import check_dtype
from triforce_offload.checkpoint.source import Corner
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType
    from triforce_offload.checkpoint.opened import Stored
    from triforce_offload.checkpoint.quantised.tensor import Read

# Suffix of the scales of an FP8 tensor: as DeepSeek and Qwen name them, and as others do.
SCALE_SUFFIX, _OTHER_SUFFIX = SCALE_SUFFIXES = "_scale_inv", "_scale"
# Scales of its inputs, which are not rounded here, and zeros that are always 0.
_UNUSED = ("input_scale", "activation_scale", "input_zero_point", "weight_zero_point")
# A matrix, or those of experts one above the other.
_DIMENSIONS = (2, 3)
_SCALES = ("F32", "F16", "BF16")
_BLOCKS, _EXPONENTS = "_blocks", "_scales"


@dataclass(frozen=True)
class Tile:
    """Which numbers of a matrix share a scale. Matrices of experts may stand one above the other.

    rows, columns: number of rows and columns that do
    across: number of scales of a row
    """

    rows: int
    columns: int
    across: int = 1

    @classmethod
    def of(cls, scales: tuple[int, ...], shape: tuple[int, ...]) -> Tile | None:
        """Return the tile that scales of a shape stand for; None if they fit none."""
        *experts, rows, columns = shape
        size, blocks = F8_E4M3.elements, _blocks(shape)
        if scales == blocks and (not experts or rows % size == 0):
            return cls(size, size, blocks[-1])
        while scales and scales[-1] == 1:
            scales = scales[:-1]
        if not scales:
            return cls(prod(experts) * rows, columns)
        if scales == tuple(experts):
            return cls(rows, columns)
        if experts and scales == (*experts, 2) and rows % 2 == 0:
            # Of gates, and of up projections.
            return cls(rows // 2, columns)
        return cls(1, columns) if scales == (*experts, rows) else None


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix, if each stands for 128 by 128 numbers."""
    *experts, rows, columns = shape
    return (*experts, -(-rows // F8_E4M3.elements), columns // F8_E4M3.elements)


@dataclass(frozen=True)
class FP8:
    """Numbers of 8 bits, with a scale for each 128 by 128 of them, for each row, for each matrix of
    several, or for all.

    scaled: name of the scales
    tile: what shares a scale, None if the scales have no such shape
    held: names of tensors that are not needed
    """

    kind: ClassVar[BlockType] = F8_E4M3

    name: str
    scaled: str
    tile: Tile | None
    held: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, stored: Mapping[str, Stored]) -> FP8:
        """Return the tensor of this name."""
        names = (name + suffix for suffix in SCALE_SUFFIXES)
        scaled = next((each for each in names if each in stored), name + SCALE_SUFFIX)
        tile, shape = None, stored[name].shape
        if scaled in stored and len(shape) in _DIMENSIONS:
            tile = Tile.of(stored[scaled].shape, shape)
        # Stacked matrices of experts have no "weight" in their names.
        prefix = name.removesuffix("weight") if name.endswith("weight") else name + "_"
        held = tuple(prefix + part for part in _UNUSED if prefix + part in stored)
        return cls(name, scaled, tile, held)

    @property
    def parts(self) -> tuple[str, ...]:
        return self.name, self.scaled, *self.held

    def shape(self, stored: Mapping[str, Stored], path: Path) -> tuple[int, ...]:
        """QuantisedTensor.shape."""
        name, size = self.name, self.kind.elements
        shape = stored[name].shape
        if len(shape) not in _DIMENSIONS or shape[-1] % size:
            raise UnsupportedModelError(
                f"{path}: {name} is F8_E4M3 of shape {list(shape)}; supported are matrices, or "
                f"those of experts in one tensor, whose rows are a multiple of {size} numbers"
            )
        if self.tile is None:
            blocks = list(_blocks(shape))
            raise CheckpointError(f"{path}: {self.scaled} is missing or not of shape {blocks}")
        check_dtype(self.scaled, stored, path, _SCALES)
        return shape

    def read_blocks(self, read: Read, into: torch.Tensor, corner: Corner) -> None:
        """QuantisedTensor.read_blocks."""
        import torch

        assert self.tile is not None, "its shape was asked for"
        size, tall, across = self.kind.elements, self.tile.rows, self.tile.across
        count = into.shape[-1] // self.kind.nbytes
        rows = into.numel() // into.shape[-1]
        numbers = torch.empty(rows, count * size, dtype=torch.float8_e4m3fn)
        read(self.name, numbers, corner)
        # Scales begin with the tile of the first row; rows of that tile above it are cut off below.
        above = corner.row % tall
        scales = torch.empty(-(-(above + rows) // tall), count if across > 1 else 1)
        begin = Corner(corner.row // tall, corner.column // self.tile.columns)
        read(self.scaled, scales, begin, across)
        each = scales.repeat_interleave(tall, 0)[above : above + rows].expand(rows, count)
        made = torch.empty(rows, count, self.kind.nbytes, dtype=torch.uint8)
        made[..., :size] = numbers.view(torch.uint8).unflatten(1, (-1, size))
        made[..., size:] = each.unsqueeze(-1).contiguous().view(torch.uint8)
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
        """QuantisedTensor.shape."""
        numbers, exponents = (stored[part].shape for part in self.parts)
        if numbers != (*exponents, self.kind.elements // 2):
            raise CheckpointError(
                f"{path}: {self.parts[0]} has shape {list(numbers)}, and its exponents have "
                f"{list(exponents)}"
            )
        return (*exponents[:-1], exponents[-1] * self.kind.elements)

    def read_blocks(self, read: Read, into: torch.Tensor, corner: Corner) -> None:
        """QuantisedTensor.read_blocks."""
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


@dataclass(frozen=True)
class NVFP4Matrix:
    """Numbers of 4 bits, those of a pair in one byte, with a scale in F8_E4M3 for each 16 of them,
    and a factor for all: compressed-tensors divides by it, ModelOpt multiplies.

    name: name of the packed numbers
    scaled, factor: names of the others
    divides: whether scales are divided by the factor
    """

    kind: ClassVar[BlockType] = NVFP4

    name: str
    scaled: str
    factor: str
    divides: bool
    held: tuple[str, ...]

    @classmethod
    def of(cls, name: str, stored: Mapping[str, Stored]) -> NVFP4Matrix:
        """Return the matrix whose packed numbers have this name."""
        divides = name.endswith("_packed")
        base = name.removesuffix("_packed")
        factor = base + ("_global_scale" if divides else "_scale_2")
        prefix = base.removesuffix("weight")
        unused = ("input_scale", "input_global_scale", "weight_shape")
        held = tuple(prefix + part for part in unused if prefix + part in stored)
        return cls(name, base + _OTHER_SUFFIX, factor, divides, held)

    @property
    def parts(self) -> tuple[str, ...]:
        return self.name, self.scaled, self.factor, *self.held

    def shape(self, stored: Mapping[str, Stored], path: Path) -> tuple[int, ...]:
        """QuantisedTensor.shape."""
        packed, scales, factor = (stored.get(part) for part in self.parts[:3])
        shape = packed.shape[0], packed.shape[1] * 2
        if scales is None or scales.shape != (shape[0], shape[1] // 16):
            raise CheckpointError(f"{path}: {self.scaled} is missing or does not fit {self.name}")
        if factor is None or prod(factor.shape) != 1:
            raise CheckpointError(f"{path}: {self.factor} is missing or not one number")
        if shape[1] % self.kind.elements:
            raise UnsupportedModelError(
                f"{path}: rows of {self.name} have {shape[1]} numbers; supported are multiples of "
                f"{self.kind.elements}"
            )
        check_dtype(self.scaled, stored, path, ("F8_E4M3",))
        check_dtype(self.factor, stored, path, ("F32",))
        return shape

    def read_blocks(self, read: Read, into: torch.Tensor, corner: Corner) -> None:
        """QuantisedTensor.read_blocks."""
        import torch

        size, count = self.kind.elements, into.shape[-1] // self.kind.nbytes
        rows = into.numel() // into.shape[-1]
        factor = torch.empty(1)
        read(self.factor, factor, Corner())
        scales = torch.empty(rows, count * size // 16, dtype=torch.float8_e4m3fn)
        read(self.scaled, scales, Corner(corner.row, corner.column // 16))
        pairs = torch.empty(rows, count * size // 2, dtype=torch.uint8)
        read(self.name, pairs, Corner(corner.row, corner.column // 2))
        numbers = torch.stack((pairs & 15, pairs >> 4), -1).view(rows, count, 2, 2, 32)
        made = torch.empty(rows, count, self.kind.nbytes, dtype=torch.uint8)
        made[..., :4] = (1 / factor if self.divides else factor).view(torch.uint8)
        made[..., 4:12] = scales.view(torch.uint8).view(rows, count, 8)
        made[..., 12:] = (numbers[..., 0, :] | numbers[..., 1, :] << 4).flatten(2)
        into.copy_(made.flatten(1).view(into.shape))


def nvfp4_matrices(stored: Mapping[str, Stored]) -> dict[str, NVFP4Matrix]:
    """Return the matrices of a checkpoint in NVFP4, by the names of unquantised ones."""
    found = {}
    for name, each in stored.items():
        base = name.removesuffix("_packed")
        if each.dtype == "U8" and len(each.shape) == 2 and base + _OTHER_SUFFIX in stored:
            found[base] = NVFP4Matrix.of(name, stored)
    return found


def float_tensors(stored: Mapping[str, Stored]) -> dict[str, FP8 | MXFP4]:
    """Return the tensors of a checkpoint in FP8 and MXFP4, by their names."""
    found: dict[str, FP8 | MXFP4] = {
        name: FP8.of(name, stored) for name, each in stored.items() if each.dtype == "F8_E4M3"
    }
    for name, each in stored.items():
        base = name.removesuffix(_BLOCKS)
        exponents = stored.get(base + _EXPONENTS)
        if base != name and each.dtype == "U8" and exponents is not None and exponents.shape:
            found[base] = MXFP4(base, exponents.shape[-1])
    return found
