"""Matrices of safetensors files in integers of 4 or 8 bits, with a scale and a zero for each group
of columns: number = (integer - zero) * scale.

Three methods store them, each in its own order: AWQ (Lin et al., arXiv 2306.00978; AutoAWQ's "gemm"
files), GPTQ (Frantar et al., arXiv 2210.17323; files of AutoGPTQ and GPTQModel), and
compressed-tensors ("pack-quantized"). All read as blocks of `block_types.INTEGERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from triforce_kernels.weights.block_types import INTEGERS
from triforce_offload.checkpoint.quantised.methods import LEAST_GROUP, Method, Quantisation
from triforce_offload.checkpoint.quantised.tensor import check_dtype
from triforce_offload.checkpoint.source import Corner
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType
    from triforce_offload.checkpoint.opened import Stored
    from triforce_offload.checkpoint.quantised.tensor import Read

# Where AWQ has each of 8 integers.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_SCALES = ("F16", "BF16")


@dataclass(frozen=True)
class Integers(ABC):
    """A matrix of integers. Subclasses read its parts.

    packed, scale, zero, order: how the names of its tensors end
    unused: likewise, of tensors that are not needed
    symmetric: whether zeros may be left out

    name: with what the names of its tensors begin
    rows, columns: shape of the matrix, 0 if the integers have none
    bits: of an integer
    groups: groups of a row, 0 if the scales do not fit the integers
    held: which of the other tensors are stored
    """

    packed: ClassVar[str]
    scale: ClassVar[str]
    zero: ClassVar[str]
    order: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = ()
    symmetric: ClassVar[bool] = False

    name: str
    rows: int
    columns: int
    bits: int
    groups: int
    held: tuple[str, ...]

    @classmethod
    def of(cls, name: str, stored: Mapping[str, Stored], quantised: Quantisation) -> Self:
        """Return the matrix whose tensors have names that begin with `name`."""
        bits, group = quantised.bits, quantised.group
        packed, scales = stored[name + cls.packed], stored.get(name + cls.scale)
        two = len(packed.shape) == 2 and packed.dtype == "I32"
        rows, columns = cls._unpacked_shape(*packed.shape, 32 // bits) if two else (0, 0)
        groups = cls._groups(scales.shape, rows) if scales and len(scales.shape) == 2 else 0
        if group > 0 and groups * group != columns:
            groups = 0
        others = (part for part in (cls.zero, cls.order, *cls.unused) if name + part in stored)
        return cls(name, rows, columns, bits, groups, tuple(others))

    @property
    def kind(self) -> BlockType:
        """The longest blocks that have one scale."""
        kinds, group = INTEGERS[self.bits], self.group
        return next((kind for size, kind in kinds.items() if group % size == 0), kinds[LEAST_GROUP])

    @property
    def of_word(self) -> int:
        """Number of integers in one of 32 bits."""
        return 32 // self.bits

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.columns // max(self.groups, 1)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all tensors, the integers first."""
        return tuple(self.name + part for part in (self.packed, self.scale, *self.held))

    def shape(self, stored: Mapping[str, Stored], path: Path) -> tuple[int, ...]:
        """QuantisedTensor.shape."""
        packed, scales, zeros = (self.name + part for part in (self.packed, self.scale, self.zero))
        if not self.groups or self.columns % self.groups:
            raise CheckpointError(f"{path}: {scales} is missing or does not fit {packed}")
        if self.group % self.kind.elements:
            raise UnsupportedModelError(
                f"{path}: {packed} has a scale for each {self.group} numbers; supported are "
                f"multiples of {LEAST_GROUP}"
            )
        check_dtype(scales, stored, path, _SCALES)
        for part in (self.zero, self.order):
            if part in self.held:
                check_dtype(self.name + part, stored, path, ("I32",))
        if self.zero not in self.held and self.symmetric:
            return self.rows, self.columns
        if self.zero not in self.held or stored[zeros].shape != self._zeros_shape():
            raise CheckpointError(f"{path}: {zeros} is missing or does not fit {packed}")
        return self.rows, self.columns

    def read_blocks(self, read: Read, into: torch.Tensor, corner: Corner) -> None:
        """QuantisedTensor.read_blocks."""
        import torch

        kind = self.kind
        rows, blocks = into.numel() // into.shape[-1], into.shape[-1] // kind.nbytes
        if self.order in self.held:
            self._check_order(read, corner.column, blocks * kind.elements)
        integers = self._integers(read, corner, rows, blocks * kind.elements)
        group_of = (torch.arange(blocks) * kind.elements + corner.column) // self.group
        first, end = int(group_of[0]), int(group_of[-1]) + 1
        at, count = Corner(corner.row, first), end - first
        words = self._scales(read, at, rows, count).view(torch.int32)
        words = (words | self._zeros(read, at, rows, count))[:, group_of - first]
        made = torch.empty(rows, blocks, kind.nbytes, dtype=torch.uint8)
        made[..., :4] = words.contiguous().view(torch.uint8).view(rows, blocks, 4)
        made[..., 4:] = (
            integers.view(rows, blocks, -1) if self.bits == 8 else _halves(integers, kind)
        )
        into.copy_(made.flatten(1).view(into.shape))

    def _check_order(self, read: Read, first: int, count: int) -> None:
        """Raise UnsupportedModelError if columns are not in the order of their groups."""
        import torch

        groups = torch.empty(count, dtype=torch.int32)
        read(self.name + self.order, groups, Corner(first))
        if not torch.equal(groups, (torch.arange(first, first + count) // self.group).int()):
            raise UnsupportedModelError(
                f"{self.name}{self.order} orders columns by activation (desc_act, actorder), which "
                "is not supported; use a checkpoint without it, or a GGUF file"
            )

    @staticmethod
    @abstractmethod
    def _unpacked_shape(first: int, second: int, of_word: int) -> tuple[int, int]:
        """Return rows and columns of the matrix, from the shape of its packed integers, `of_word`
        of which are in one of 32 bits.
        """

    @staticmethod
    @abstractmethod
    def _groups(shape: tuple[int, ...], rows: int) -> int:
        """Return how many groups scales of this shape have for a row; 0 for a wrong shape."""

    @abstractmethod
    def _zeros_shape(self) -> tuple[int, ...]:
        """Return the shape of stored zeros."""

    @abstractmethod
    def _integers(self, read: Read, corner: Corner, rows: int, columns: int) -> torch.Tensor:
        """Return integers [rows, columns] uint8 from a corner on."""

    @abstractmethod
    def _scales(self, read: Read, corner: Corner, rows: int, groups: int) -> torch.Tensor:
        """Return scales [rows, groups] float32, contiguous, from a row and a group on."""

    @abstractmethod
    def _zeros(self, read: Read, corner: Corner, rows: int, groups: int) -> torch.Tensor:
        """Return zeros [rows, groups] int32 likewise."""


class _Transposed(Integers):
    """Scales are [groups, rows], and zeros [groups, rows / 8] for 4 bits."""

    packed, scale, zero, order = "qweight", "scales", "qzeros", "g_idx"

    @staticmethod
    def _groups(shape: tuple[int, ...], rows: int) -> int:
        return shape[0] if shape[1] == rows else 0

    def _zeros_shape(self) -> tuple[int, ...]:
        return self.groups, self.rows // self.of_word

    def _scales(self, read: Read, corner: Corner, rows: int, groups: int) -> torch.Tensor:
        import torch

        scales = torch.empty(groups, rows)
        read(self.name + self.scale, scales, Corner(corner.column, corner.row))
        return scales.T.contiguous()

    def _words(
        self, read: Read, part: str, corner: Corner, rows: int, columns: int
    ) -> tuple[torch.Tensor, int]:
        """Read a part of a tensor that has several rows of the matrix in an integer of 32 bits:
        [columns, integers]. Return it, and how many rows it has above those that were asked for.
        """
        import torch

        first, above = divmod(corner.row, self.of_word)
        words = torch.empty(columns, -(-(above + rows) // self.of_word), dtype=torch.int32)
        read(self.name + part, words, Corner(corner.column, first))
        return words, above


class AWQ(_Transposed):
    """Integers are [columns, rows / 8], those of 8 rows in an order of their own."""

    @staticmethod
    def _unpacked_shape(first: int, second: int, of_word: int) -> tuple[int, int]:
        return second * of_word, first

    def _integers(self, read: Read, corner: Corner, rows: int, columns: int) -> torch.Tensor:
        return self._ordered(*self._words(read, self.packed, corner, rows, columns), rows)

    def _zeros(self, read: Read, corner: Corner, rows: int, groups: int) -> torch.Tensor:
        return self._ordered(*self._words(read, self.zero, corner, rows, groups), rows).int()

    def _ordered(self, words: torch.Tensor, above: int, rows: int) -> torch.Tensor:
        """Return [rows, columns] uint8."""
        fours = _unpacked(words, self.bits)[..., _AWQ_ORDER].flatten(1)
        return fours[:, above : above + rows].T.contiguous()


class GPTQ(_Transposed):
    """Integers are [columns / 8, rows] for 4 bits. Zeros are stored less 1."""

    less_one: ClassVar[bool] = True

    @staticmethod
    def _unpacked_shape(first: int, second: int, of_word: int) -> tuple[int, int]:
        return second, first * of_word

    def _integers(self, read: Read, corner: Corner, rows: int, columns: int) -> torch.Tensor:
        import torch

        words = torch.empty(columns // self.of_word, rows, dtype=torch.int32)
        read(self.name + self.packed, words, Corner(corner.column // self.of_word, corner.row))
        return _unpacked(words, self.bits).permute(1, 0, 2).flatten(1)

    def _zeros(self, read: Read, corner: Corner, rows: int, groups: int) -> torch.Tensor:
        words, above = self._words(read, self.zero, corner, rows, groups)
        if self.less_one:
            # As in GPTQModel, the greatest integer becomes 0 and carries 1 to the next.
            words += 0x11111111 if self.bits == 4 else 0x01010101
        return _unpacked(words, self.bits).flatten(1)[:, above : above + rows].T.int()


class GPTQv2(GPTQ):
    """GPTQ with zeros as they are."""

    less_one = False


class PackedIntegers(Integers):
    """compressed-tensors: for 4 bits, integers are [rows, columns / 8], scales [rows, groups], and
    zeros [rows / 8, groups].
    """

    packed, scale = "weight_packed", "weight_scale"
    zero, order = "weight_zero_point", "weight_g_idx"
    unused = ("weight_shape",)
    symmetric = True

    @staticmethod
    def _unpacked_shape(first: int, second: int, of_word: int) -> tuple[int, int]:
        return first, second * of_word

    @staticmethod
    def _groups(shape: tuple[int, ...], rows: int) -> int:
        return shape[1] if shape[0] == rows else 0

    def _zeros_shape(self) -> tuple[int, ...]:
        return -(-self.rows // self.of_word), self.groups

    def _integers(self, read: Read, corner: Corner, rows: int, columns: int) -> torch.Tensor:
        import torch

        words = torch.empty(rows, columns // self.of_word, dtype=torch.int32)
        read(self.name + self.packed, words, Corner(corner.row, corner.column // self.of_word))
        return _unpacked(words, self.bits).flatten(1)

    def _scales(self, read: Read, corner: Corner, rows: int, groups: int) -> torch.Tensor:
        import torch

        scales = torch.empty(rows, groups)
        read(self.name + self.scale, scales, corner)
        return scales

    def _zeros(self, read: Read, corner: Corner, rows: int, groups: int) -> torch.Tensor:
        import torch

        if self.zero not in self.held:
            return torch.full((rows, groups), 1 << self.bits - 1, dtype=torch.int32)
        first, above = divmod(corner.row, self.of_word)
        words = torch.empty(-(-(above + rows) // self.of_word), groups, dtype=torch.int32)
        read(self.name + self.zero, words, Corner(first, corner.column))
        return (
            _unpacked(words, self.bits).permute(0, 2, 1).flatten(0, 1)[above : above + rows].int()
        )


_METHODS: dict[Method, type[Integers]] = {
    Method.AWQ: AWQ,
    Method.GPTQ: GPTQ,
    Method.GPTQ_V2: GPTQv2,
    Method.PACKED: PackedIntegers,
}


def integer_matrices(stored: Mapping[str, Stored], quantised: Quantisation) -> dict[str, Integers]:
    """Return the matrices of integers of a checkpoint, by the names of unquantised ones."""
    if (kind := _METHODS.get(quantised.method)) is None:
        return {}
    ending = "." + kind.packed
    names = [name.removesuffix(kind.packed) for name in stored if name.endswith(ending)]
    return {name + "weight": kind.of(name, stored, quantised) for name in names}


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers that are in each of 32 bits, lowest first: [..., 32 / bits] uint8."""
    import torch

    eights = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    if bits == 8:
        return eights
    return torch.stack((eights & 15, eights >> 4), -1).flatten(-2)


def _halves(integers: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Return the bytes of blocks of 4-bit integers: [rows, columns] to [rows, blocks, bytes]."""
    size = min(32, kind.elements // 2)
    pairs = integers.view(len(integers), -1, kind.elements // (2 * size), 2, size)
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(2)
