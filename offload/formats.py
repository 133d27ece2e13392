"""How numbers are stored. Sizes need no tensors, so a plan can be made without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
