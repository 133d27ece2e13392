"""Locations: where the bytes of a block or a layer are, and how compute gets them.

Compute cannot tell where bytes were. Bytes that have to cross the link first are the location's
`source`: the schedule lists the source, the conveyor copies it to a slot, and a layer's location
makes views of the slot. A location may send fewer bytes over the link than it has, or join the
streamed bytes with others that are on the device already.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from triforce_kernels.dispatch import HOST, backend
from triforce_offload.link.link import Event, OnDemand
from triforce_offload.weights.layouts import FlatLayout, Views


class Source(NamedTuple):
    """Bytes that must cross the link before a location can be read.

    bytes: flat uint8 host buffer, or an OnDemand that is read when it crosses
    after: events after which the buffer has its bytes
    """

    bytes: torch.Tensor | OnDemand
    after: tuple[Event, ...] = ()


class Located(Protocol):
    """Where bytes are. Buffers are flat uint8."""

    @property
    def source(self) -> Source | None:
        """Bytes that must come to a slot first; None if all bytes are on the device."""

    @property
    def memory(self) -> torch.Tensor | None:
        """The bytes in their place, on device or host, of which a gather reads parts. For host
        memory, `source` has the events after which it is valid. None if the bytes are in a file.
        """


class Location(Located, Protocol):
    """Where the bytes of a KV block are.

    dense: whether the block is kept dense although other blocks are split
    """

    dense: bool

    @property
    def host(self) -> HostLocation | None:
        """The host location of the bytes, if host memory has them (alone or as well); else None."""


class LayerLocation(Located, Protocol):
    """Where the weights of a layer are, and which tensors passes and the retrieval level read.

    by_processor: whether the processor computes the whole layer, where it is in host memory
    """

    by_processor: bool

    def views(self, layout: FlatLayout, buffer: torch.Tensor) -> Views:
        """Return the layer's exact tensors.

        buffer: the bytes of `source` on the device; `memory` if there is no source
        """

    def draft_views(self, layout: FlatLayout, *, high: bool) -> Views:
        """Return the tensors on the device that the retrieval level computes with.

        high: whether it reads only the high bits of split tensors
        """


class DeviceLocation:
    """Bytes that stay on the device."""

    dense, by_processor = False, False
    source, host = None, None

    def __init__(self, buffer: torch.Tensor) -> None:
        self.memory = buffer

    def views(self, layout: FlatLayout, buffer: torch.Tensor) -> Views:
        return layout.views(buffer)

    def draft_views(self, layout: FlatLayout, *, high: bool) -> Views:
        return layout.high(self.memory) if high else layout.views(self.memory)


class HostLocation:
    """Bytes in host memory, all of which cross the link each time they are read."""

    dense, by_processor = False, False

    def __init__(self, buffer: torch.Tensor, written: Event | None = None) -> None:
        """written: event after which the buffer has its bytes; None if it has them now."""
        self.memory = buffer
        self.source = Source(buffer, () if written is None else (written,))

    @property
    def host(self) -> HostLocation:
        return self

    def views(self, layout: FlatLayout, buffer: torch.Tensor) -> Views:
        return layout.views(buffer)


class ProcessorLocation:
    """A layer in host memory, with which the processor computes where it is: all of the layer, or
    its experts alone.
    """

    source = None

    def __init__(self, streamed: HostLocation | PartlyResidentLocation) -> None:
        """streamed: the location for prefills, for which the same bytes cross the link"""
        self._streamed = streamed
        self.memory = streamed.source.bytes
        self.by_processor = isinstance(streamed, HostLocation)

    def views(self, layout: FlatLayout, buffer: torch.Tensor) -> Views:
        """LayerLocation.views. Vectors of a whole layer are copies in the dtype in which the
        processor computes.
        """
        views = self._streamed.views(layout, buffer)
        if self.by_processor:
            for name, tensor in views.items():
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 1:
                    views[name] = tensor.to(processor_dtype(tensor.dtype))
            views.by_processor = True
        return views


def processor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the processor computes layers of a model with a dtype: its compiled
    kernels compute in float32.
    """
    compiled = backend(torch.device("cpu")) == HOST
    return torch.promote_types(dtype, torch.float32) if compiled else dtype


class DenseLocation(HostLocation):
    """A block of keys and values in host memory that is kept dense although others are split,
    because it has more exceptions than a split block has room for.
    """

    dense = True


class PartlyResidentLocation:
    """A layer in two parts: the first stays on the device, the last crosses the link. The last part
    has the low bits of split tensors, or the layer's experts.
    """

    by_processor = False

    def __init__(self, resident: torch.Tensor, last: torch.Tensor) -> None:
        """resident: bytes on the device; last: bytes on the host."""
        self.memory = resident
        self.source = Source(last)

    def views(self, layout: FlatLayout, buffer: torch.Tensor) -> Views:
        return layout.joined(self.memory, buffer)

    def draft_views(self, layout: FlatLayout, *, high: bool) -> Views:
        return layout.high(self.memory)


class FileLocation:
    """A layer that is read from a file, and crosses the link, each time it is needed."""

    by_processor, memory = False, None

    def __init__(self, content: OnDemand) -> None:
        self.source = Source(content)

    def views(self, layout: FlatLayout, buffer: torch.Tensor) -> Views:
        return layout.views(buffer)


class MirroredLocation:
    """A block in host memory with a copy on the device, which may be dropped at any time."""

    dense, source = False, None

    def __init__(self, host: HostLocation, copy: torch.Tensor) -> None:
        self.host = host
        self.memory = copy
