"""Named tensors in one flat buffer: a layer's weights, the same offsets on host and in a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from triforce_offload.formats import Blocks, Format, Nested, Stack, aligned

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.linear import Weight

# Named tensors.
Views = Mapping[str, "Weight"]


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor, in a format of its own, lies in a flat buffer of `nbytes` bytes.

    lower_offsets: of the lower planes of those that have such, which lie behind everything else
    upper_bytes: of what lies before these
    """

    formats: Mapping[str, Format]
    offsets: Mapping[str, int]
    lower_offsets: Mapping[str, int]
    upper_bytes: int
    nbytes: int

    @classmethod
    def of(cls, formats: Mapping[str, Format]) -> FlatLayout:
        offsets, lower_offsets, end = {}, {}, 0
        for name, stored in formats.items():
            offsets[name] = end
            end += aligned(stored.upper_bytes if isinstance(stored, Nested) else stored.nbytes)
        upper_bytes = end
        for name, stored in formats.items():
            if isinstance(stored, Nested):
                lower_offsets[name] = end
                end += stored.lower_bytes
        return cls(
            MappingProxyType(dict(formats)),
            MappingProxyType(offsets),
            MappingProxyType(lower_offsets),
            upper_bytes,
            end,
        )

    @property
    def lower_bytes(self) -> int:
        """Of the lower planes: what passes alone read."""
        return self.nbytes - self.upper_bytes

    def decoded(self) -> Iterator[Blocks | Nested]:
        """The matrices, or parts of such, that are not dense."""
        for stored in self.formats.values():
            parts = stored.parts if isinstance(stored, Stack) else (stored,)
            yield from (part for part in parts if isinstance(part, Blocks | Nested))

    def blocks(self) -> Iterator[Blocks]:
        """Those in a GGUF file's blocks."""
        return (part for part in self.decoded() if isinstance(part, Blocks))

    def views(self, buffer: torch.Tensor) -> dict[str, Weight]:
        """The named tensors as views of a flat uint8 buffer of at least `nbytes` bytes."""
        return self.joined(buffer[: self.upper_bytes], buffer[self.upper_bytes : self.nbytes])

    def joined(self, buffer: torch.Tensor, lower: torch.Tensor | None) -> dict[str, Weight]:
        """The same of two buffers, of `upper_bytes` and `lower_bytes`. Without the second, what can
        be read of them by the upper planes.
        """
        views: dict[str, Weight] = {}
        for name, stored in self.formats.items():
            start = self.offsets[name]
            if not isinstance(stored, Nested):
                views[name] = stored.view(buffer[start : start + stored.nbytes])
            elif lower is None:
                views[name] = stored.upper(buffer[start:])
            else:
                below = self.lower_offsets[name] - self.upper_bytes
                views[name] = stored.joined(buffer[start:], lower[below:])
        return views
