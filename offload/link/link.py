"""The link: it copies bytes between host and device, and events order its copies.

Two links run the same code above them: `CudaLink` (PCIe) and `EmulatedLink` (a paced copy thread on
a machine without a GPU). Nothing above this interface knows which one it uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

# A point in a link's time. The link creates it, and it is only ever passed back to the link.
Event = Any


@dataclass(frozen=True)
class LinkCounters:
    """Bytes that crossed the link since it was created. Subtract two to get what crossed in
    between.

    busy_seconds: time during which the link copied bytes to the device
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    busy_seconds: float = 0.0

    def __sub__(self, other: LinkCounters) -> LinkCounters:
        return LinkCounters(
            self.bytes_to_device - other.bytes_to_device,
            self.bytes_to_host - other.bytes_to_host,
            self.busy_seconds - other.busy_seconds,
        )


class OnDemand(Protocol):
    """Bytes that are not in memory: they are read, e.g. from a file, when they have to cross."""

    def numel(self) -> int:
        """Return the number of bytes."""

    def read(self, into: torch.Tensor) -> None:
        """Write the bytes to a flat uint8 host buffer of that size. An exception fails the copy."""


class Link(Protocol):
    """Asynchronous copies between flat uint8 buffers of equal size.

    Events alone set the order. `to_device` and `to_host` return at once with the event of their
    completion; a copy starts after every event in `after`. Copies of one direction happen in the
    order of the calls; the two directions are independent. `what` names a copy in a trace of the
    link.
    """

    emulated: bool

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second to the device: emulated as given, measured on CUDA; None if unpaced."""

    @property
    def copy_bytes(self) -> int:
        """The smallest size at which a copy runs at about full speed."""

    def to_device(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        after: Sequence[Event],
        what: Hashable = None,
    ) -> Event: ...

    def to_host(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        after: Sequence[Event],
        what: Hashable = None,
    ) -> Event: ...

    def record(self) -> Event:
        """Return the event of everything computed so far."""

    def wait(self, event: Event) -> None:
        """Make later compute start after `event`. Raises LinkError if its copy failed."""

    def wait_on_host(self, event: Event) -> None:
        """Block the host until `event`. Raises LinkError if its copy failed."""

    def keep_times(self) -> None:
        """Record the times of all later events for `span`, not only those of copies."""

    def span(self, event: Event) -> tuple[float, float]:
        """Return when the operation that `event` ends began and ended, in seconds of
        time.perf_counter: for a copy its transfer over the link; for an event of `record` its
        moment, twice. Blocks the host until then.
        """

    def counters(self) -> LinkCounters: ...

    def synchronize(self) -> None:
        """Block the host until every copy is done.

        Raises LinkError if a copy failed since the last call.
        """

    def close(self) -> None: ...


class WrappedLink:
    """A link over another, which forwards every call. Subclasses override what they change."""

    def __init__(self, link: Link) -> None:
        self.emulated = link.emulated
        self._link = link

    @property
    def bandwidth(self) -> float | None:
        return self._link.bandwidth

    @property
    def copy_bytes(self) -> int:
        return self._link.copy_bytes

    def to_device(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        after: Sequence[Event],
        what: Hashable = None,
    ) -> Event:
        return self._link.to_device(device, host, after, what)

    def to_host(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        after: Sequence[Event],
        what: Hashable = None,
    ) -> Event:
        return self._link.to_host(host, device, after, what)

    def record(self) -> Event:
        return self._link.record()

    def wait(self, event: Event) -> None:
        self._link.wait(event)

    def wait_on_host(self, event: Event) -> None:
        self._link.wait_on_host(event)

    def keep_times(self) -> None:
        self._link.keep_times()

    def span(self, event: Event) -> tuple[float, float]:
        return self._link.span(event)

    def counters(self) -> LinkCounters:
        return self._link.counters()

    def synchronize(self) -> None:
        self._link.synchronize()

    def close(self) -> None:
        self._link.close()
