"""Named tensors in one flat buffer: a layer's weights, the same offsets on host and in a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from offload.formats import Blocks, Format, Stack, aligned

if TYPE_CHECKING:
    import torch
    from triforce_kernels.linear import Weight

# Named tensors.
Views = Mapping[str, "Weight"]


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor, in a format of its own, lies in a flat buffer of `nbytes` bytes."""

    formats: Mapping[str, Format]
    offsets: Mapping[str, int]
    nbytes: int

    @classmethod
    def of(cls, formats: Mapping[str, Format]) -> FlatLayout:
        offsets, end = {}, 0
        for name, stored in formats.items():
            offsets[name] = end
            end += aligned(stored.nbytes)
        return cls(MappingProxyType(dict(formats)), MappingProxyType(offsets), end)

    def blocks(self) -> Iterator[Blocks]:
        """The matrices, or parts of such, that are stored in blocks."""
        for stored in self.formats.values():
            parts = stored.parts if isinstance(stored, Stack) else (stored,)
            yield from (part for part in parts if isinstance(part, Blocks))

    def views(self, buffer: torch.Tensor) -> dict[str, Weight]:
        """The named tensors as views of a flat uint8 buffer of at least `nbytes` bytes."""
        return {
            name: stored.view(buffer[start : start + stored.nbytes])
            for (name, stored), start in zip(
                self.formats.items(), self.offsets.values(), strict=True
            )
        }
