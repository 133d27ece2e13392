"""Named tensors in one flat buffer: a layer's weights, the same offsets on host and in a slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from offload.formats import ALIGNMENT, ElementType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor lies in a flat buffer of `nbytes` bytes."""

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    dtype: ElementType
    nbytes: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: ElementType) -> FlatLayout:
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(MappingProxyType(dict(shapes)), MappingProxyType(offsets), dtype, end)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The named tensors as views of a flat uint8 buffer of at least `nbytes` bytes."""
        return {
            name: buffer[start : start + math.prod(shape) * self.dtype.itemsize]
            .view(self.dtype)
            .view(shape)
            for (name, shape), start in zip(self.shapes.items(), self.offsets.values(), strict=True)
        }
