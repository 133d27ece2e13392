"""Named tensors in one flat buffer: a layer's weights, at equal offsets on host and in a slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from triforce_offload.weights.experts import ExpertSizes
from triforce_offload.weights.formats import Format, Matrix, aligned

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.linear import Weight


class Views(dict[str, "Weight"]):
    """Named tensors of a layer, in one place.

    by_processor: whether the processor computes the layer; vectors are then in the dtype in which
        it computes
    prepared: what a computation makes of their addresses once; None before
    pool: the experts that are on the device, if these tensors are in host memory
    note: notes which of these experts the rows of a prefill chose, [rows, active] int64
    biases: those of experts in host memory, by dtype, as products take them
    """

    by_processor = False
    prepared: Any = None
    pool: Pool | None = None
    note: Callable[[torch.Tensor], None] | None = None

    @cached_property
    def biases(self) -> dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]]:
        return {}


class Pool(Protocol):
    """Experts of a layer that are on the device as well (`expert_pool`).

    views: their tensors. slots: their number
    """

    views: Views
    slots: int

    def divide(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def used(self, chosen: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor is in a flat buffer of `nbytes` bytes. Each tensor has its own
    format.

    The buffer has two parts, of which the last may be elsewhere than the first: the low bits of
    split tensors, or the experts of a layer without split tensors.

    low_offsets: offsets of the low bits of split tensors
    first_bytes: bytes of the first part
    """

    formats: Mapping[str, Format]
    offsets: Mapping[str, int]
    low_offsets: Mapping[str, int]
    first_bytes: int
    nbytes: int

    @classmethod
    def of(cls, formats: Mapping[str, Format], experts: Collection[str] = ()) -> FlatLayout:
        """experts: names of the tensors of experts"""
        offsets, low_offsets, end = {}, {}, 0
        splits = any(stored.split for stored in formats.values())
        last = [] if splits else [name for name in formats if name in experts]
        for name, stored in formats.items():
            if name not in last:
                offsets[name] = end
                end += aligned(stored.high_bytes)
        first_bytes = end
        for name in last:
            offsets[name] = end
            end += aligned(formats[name].high_bytes)
        for name, stored in formats.items():
            if stored.split:
                low_offsets[name] = end
                end += stored.low_bytes
        return cls(
            MappingProxyType(dict(formats)),
            MappingProxyType(offsets),
            MappingProxyType(low_offsets),
            first_bytes,
            end,
        )

    @property
    def low_bytes(self) -> int:
        """Bytes of the low bits, which only passes read."""
        return self.nbytes - self.first_bytes if self.low_offsets else 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of the experts, if these are the last part."""
        return 0 if self.low_offsets else self.nbytes - self.first_bytes

    def experts(self, count: int) -> ExpertSizes | None:
        """Return the sizes of `count` experts that are the last part; None if they are not, or if
        the bytes of an expert do not follow one another.
        """
        own = self.of_experts(1, count) if self.expert_bytes else None
        if own is None:
            return None
        return ExpertSizes(count, tuple(each.nbytes for each in own.formats.values()))

    def of_experts(self, slots: int, count: int) -> FlatLayout | None:
        """Return the layout of some of `count` experts, as `experts` does."""
        formats: dict[str, Format] = {}
        for name, stored in self.formats.items():
            if self.offsets[name] >= self.first_bytes:
                part = stored.of_share(slots, count)
                if part is None:
                    return None
                formats[name] = part
        return FlatLayout.of(formats)

    def decoded(self) -> Iterator[Matrix]:
        """Yield the matrices, or parts of matrices, that products have to decode."""
        for stored in self.formats.values():
            yield from stored.decoded()

    def views(self, buffer: torch.Tensor) -> Views:
        """Return the named tensors as views of a flat uint8 buffer of at least `nbytes` bytes."""
        return self.joined(buffer[: self.first_bytes], buffer[self.first_bytes : self.nbytes])

    def joined(self, first: torch.Tensor, last: torch.Tensor) -> Views:
        """Return the named tensors as views of two buffers with the two parts."""
        views = Views()
        for name, stored in self.formats.items():
            offset, low = self.offsets[name], self.low_offsets.get(name, self.first_bytes)
            apart = offset >= self.first_bytes
            high = last[offset - self.first_bytes :] if apart else first[offset:]
            views[name] = stored.joined(high, last[low - self.first_bytes :])
        return views

    def high(self, buffer: torch.Tensor) -> Views:
        """Return the named tensors as the high bits alone give them, which `buffer` has."""
        formats, offsets = self.formats.items(), self.offsets
        return Views((name, stored.high(buffer[offsets[name] :])) for name, stored in formats)
