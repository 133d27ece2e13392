"""Homes: where the bytes of a block or a layer lie, and how compute gets them.

Who computes asks a location for its bytes and cannot tell where they were. What has to cross the
link first is the location's `source`: the schedule lists it, the conveyor carries it to a slot, and
the location says what the bytes are once it has come. A location may read less over the link than
it holds, or join what comes with what is on the device already.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from triforce_offload.link.link import Event, OnDemand
from triforce_offload.weights.layouts import FlatLayout, Views


class Source(NamedTuple):
    """What must cross the link before a location can be read.

    bytes: flat uint8 host buffer, or what is read then; after: events before which it does not hold
        its bytes
    """

    bytes: torch.Tensor | OnDemand
    after: tuple[Event, ...] = ()


class Location(Protocol):
    """Where the bytes of a KV block are. Buffers are flat uint8.

    dense: whether it is a block that is kept dense where others are split
    """

    dense: bool

    @property
    def source(self) -> Source | None:
        """What has to come to a slot first; None if all is on the device."""

    @property
    def memory(self) -> torch.Tensor | None:
        """The bytes where they lie, device or host: what a gather reads parts of. Of host memory,
        `source` says from when on. None if they lie in a file.
        """

    @property
    def host(self) -> HostLocation | None:
        """The bytes in host memory, if they are there too or alone."""

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        """The bytes on the device. slot: what came of `source`, None where there is none."""


class LayerLocation(Location, Protocol):
    """Where the weights of a layer are, and what passes and the retrieval level get of them."""

    def views(self, layout: FlatLayout, came: torch.Tensor) -> Views:
        """The layer's tensors, exactly. came: what `read` gave."""

    def draft_views(self, layout: FlatLayout, *, high: bool) -> Views:
        """The tensors on the device that the retrieval level computes with.

        high: whether it reads only the high bits of what is split
        """


class DeviceLocation:
    """Bytes that stay on the device."""

    dense, source, host = False, None, None

    def __init__(self, buffer: torch.Tensor) -> None:
        self.memory = buffer

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        return self.memory

    def views(self, layout: FlatLayout, came: torch.Tensor) -> Views:
        return layout.views(came)

    def draft_views(self, layout: FlatLayout, *, high: bool) -> Views:
        return layout.joined(self.memory, None) if high else layout.views(self.memory)


class HostLocation:
    """Bytes in host memory, all of which cross the link each time they are read."""

    dense = False

    def __init__(self, buffer: torch.Tensor, written: Event | None = None) -> None:
        """written: from when on the buffer holds its bytes; None for now."""
        self.memory = buffer
        self.source = Source(buffer, () if written is None else (written,))

    @property
    def host(self) -> HostLocation:
        return self

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        return slot

    def views(self, layout: FlatLayout, came: torch.Tensor) -> Views:
        return layout.views(came)


class DenseLocation(HostLocation):
    """A block of keys and values in host memory that is kept dense, where others are split:
    they have no room for its exceptions.
    """

    dense = True


class SplitLocation:
    """A layer of which the first bytes, the high bits among them, stay on the device and the
    last, the low bits, cross the link.
    """

    def __init__(self, resident: torch.Tensor, low: torch.Tensor) -> None:
        """resident: on the device; low: on the host."""
        self.memory = resident
        self.source = Source(low)

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        """What came: the rest is `memory`."""
        return slot

    def views(self, layout: FlatLayout, came: torch.Tensor) -> Views:
        return layout.joined(self.memory, came)

    def draft_views(self, layout: FlatLayout, *, high: bool) -> Views:
        return layout.joined(self.memory, None)


class FileLocation:
    """A layer that is read from a file, and crosses the link, each time it is asked for."""

    memory = None

    def __init__(self, content: OnDemand) -> None:
        self.source = Source(content)

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        return slot

    def views(self, layout: FlatLayout, came: torch.Tensor) -> Views:
        return layout.views(came)


class MirroredLocation:
    """A block in host memory with a copy on the device, which may be dropped at any time."""

    dense, source = False, None

    def __init__(self, host: HostLocation, copy: torch.Tensor) -> None:
        self.host = host
        self.memory = copy

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        return self.memory
