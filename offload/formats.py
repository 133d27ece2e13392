"""How numbers are stored. Sizes need no tensors, so a plan can be made without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

# Bytes. Equal alignment everywhere keeps vectorised kernels bitwise equal at any placement.
ALIGNMENT = 256


class ElementType(Protocol):
    """A torch.dtype, or for a plan whatever knows its size."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True)
class Dtype:
    """An element type by its name in torch: what plans are made with, where torch is not loaded."""

    name: str
    itemsize: int


DTYPES = {t.name: t for t in (Dtype("float32", 4), Dtype("bfloat16", 2), Dtype("float16", 2))}


class Format(Protocol):
    """How one tensor is stored in a flat buffer."""

    @property
    def nbytes(self) -> int: ...

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in a flat uint8 buffer of `nbytes` bytes."""


@dataclass(frozen=True)
class Dense:
    """Every element as it is, row by row."""

    shape: tuple[int, ...]
    dtype: ElementType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(self.dtype).view(self.shape)


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
