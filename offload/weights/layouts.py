"""Named tensors in one flat buffer: a layer's weights, at equal offsets on host and in a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from triforce_offload.weights.formats import Format, Matrix, aligned

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.linear import Weight

# Named tensors of a layer.
Views = Mapping[str, "Weight"]


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor is in a flat buffer of `nbytes` bytes. Each tensor has its own
    format.

    low_offsets: offsets of the low bits of split tensors, which come after everything else
    high_bytes: bytes before these
    """

    formats: Mapping[str, Format]
    offsets: Mapping[str, int]
    low_offsets: Mapping[str, int]
    high_bytes: int
    nbytes: int

    @classmethod
    def of(cls, formats: Mapping[str, Format]) -> FlatLayout:
        offsets, low_offsets, end = {}, {}, 0
        for name, stored in formats.items():
            offsets[name] = end
            end += aligned(stored.high_bytes)
        high_bytes = end
        for name, stored in formats.items():
            if stored.split:
                low_offsets[name] = end
                end += stored.low_bytes
        return cls(
            MappingProxyType(dict(formats)),
            MappingProxyType(offsets),
            MappingProxyType(low_offsets),
            high_bytes,
            end,
        )

    @property
    def low_bytes(self) -> int:
        """Bytes of the low bits, which only passes read."""
        return self.nbytes - self.high_bytes

    def decoded(self) -> Iterator[Matrix]:
        """Yield the matrices, or parts of matrices, that products have to decode."""
        for stored in self.formats.values():
            yield from stored.decoded()

    def views(self, buffer: torch.Tensor) -> dict[str, Weight]:
        """Return the named tensors as views of a flat uint8 buffer of at least `nbytes` bytes."""
        return self.joined(buffer[: self.high_bytes], buffer[self.high_bytes : self.nbytes])

    def joined(self, buffer: torch.Tensor, low: torch.Tensor | None) -> dict[str, Weight]:
        """Return the named tensors as views of two buffers, of `high_bytes` and of `low_bytes`.
        Without the second buffer, return what the high bits alone give.
        """
        views: dict[str, Weight] = {}
        for name, stored in self.formats.items():
            high = buffer[self.offsets[name] :]
            if low is None:
                views[name] = stored.high(high)
            else:
                first = self.low_offsets.get(name, self.high_bytes) - self.high_bytes
                views[name] = stored.joined(high, low[first:])
        return views
