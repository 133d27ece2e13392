"""Homes: where the bytes of a block or a layer lie, and how compute gets them.

Who computes asks a home for its bytes and cannot tell where they were. What has to cross the link
first is the home's `source`: the schedule lists it, the conveyor carries it to a slot, and the home
says what the bytes are once it has come. A home may read less over the link than it holds, or join
what comes with what is on the device already.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from offload.link.link import Event, OnDemand


class Source(NamedTuple):
    """What must cross the link before a home can be read.

    bytes: flat uint8 host buffer, or what is read then; after: events before which it does not hold
        its bytes
    """

    bytes: torch.Tensor | OnDemand
    after: tuple[Event, ...] = ()


class Home(Protocol):
    """Where some bytes lie. Buffers are flat uint8."""

    @property
    def source(self) -> Source | None:
        """What has to come to a slot first; None if all is on the device."""

    @property
    def memory(self) -> torch.Tensor | None:
        """The bytes where they lie, device or host: what a gather reads parts of. Of host memory,
        `source` says from when on. None if they lie in a file.
        """

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        """The bytes on the device. slot: what came of `source`, None where there is none."""


class DeviceHome:
    """Bytes that stay on the device."""

    source = None

    def __init__(self, buffer: torch.Tensor) -> None:
        self.memory = buffer

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        return self.memory


class HostHome:
    """Bytes in host memory, all of which cross the link each time they are read."""

    def __init__(self, buffer: torch.Tensor, written: Event | None = None) -> None:
        """written: from when on the buffer holds its bytes; None for now."""
        self.memory = buffer
        self.source = Source(buffer, () if written is None else (written,))

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        return slot


class DenseHome(HostHome):
    """A block of keys and values in host memory that is kept dense, where others are in planes:
    they have no room for its exceptions.
    """


class HalvedHome:
    """Bytes of which the first, the upper planes among them, stay on the device and the last, the
    lower planes, cross the link.
    """

    def __init__(self, resident: torch.Tensor, lower: torch.Tensor) -> None:
        """resident: on the device; lower: on the host."""
        self.memory = resident
        self.source = Source(lower)

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        """What came: the rest is `memory`."""
        return slot


class FileHome:
    """Bytes that are read from a file, and cross the link, each time they are asked for."""

    memory = None

    def __init__(self, content: OnDemand) -> None:
        self.source = Source(content)

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        return slot


class MirroredHome:
    """Bytes in host memory with a copy on the device, which may be dropped at any time."""

    source = None

    def __init__(self, host: HostHome, copy: torch.Tensor) -> None:
        self.host = host
        self.memory = copy

    def read(self, slot: torch.Tensor | None) -> torch.Tensor:
        return self.memory
