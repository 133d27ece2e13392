"""The link: what carries bytes between host and device, and the events that order its copies.

Two links run the same code above them: `CudaLink` (PCIe) and `EmulatedLink` (a paced copy thread
on a machine without a GPU). Nothing above this interface knows which one it uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

# A point in a link's time, made by the link and only ever handed back to it.
Event = Any


@dataclass(frozen=True)
class LinkCounters:
    """What crossed the link since it was made. Subtract two to get what crossed in between.

    busy_seconds: in which the link carried bytes to the device
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
    """Bytes that lie in no memory: they are read, from a file say, when they have to cross."""

    def numel(self) -> int:
        """How many."""

    def read(self, into: torch.Tensor) -> None:
        """Writes them to a flat uint8 host buffer of that size. Whatever it raises fails the
        copy.
        """


class Link(Protocol):
    """Asynchronous copies between flat uint8 buffers of equal size.

    The order is set by events alone. `to_device` and `to_host` return at once with the event of
    their completion; a copy starts after every event in `after`. Copies of one direction happen in
    the order they were asked for; the two directions are independent. `what` names a copy to
    whoever traces the link.
    """

    emulated: bool

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second to the device: emulated as asked, measured on CUDA; None if unpaced."""

    @property
    def copy_bytes(self) -> int:
        """The size from which on a copy runs at about full speed."""

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
        """The event of everything computed so far."""

    def wait(self, event: Event) -> None:
        """Compute that follows starts after `event`. Raises LinkError when its copy failed."""

    def wait_on_host(self, event: Event) -> None:
        """Blocks the host until `event`. Raises LinkError when its copy failed."""

    def keep_times(self) -> None:
        """From now on `span` tells the times of events too, not of copies alone."""

    def span(self, event: Event) -> tuple[float, float]:
        """When what ends with `event` began and ended, in seconds of time.perf_counter: a copy's
        way over the link, or twice the moment that `record` marks. Blocks the host until then.
        """

    def counters(self) -> LinkCounters: ...

    def synchronize(self) -> None:
        """Blocks the host until every copy asked for is done.

        Raises LinkError if one failed since the last call.
        """

    def close(self) -> None: ...


class WrappedLink:
    """A link over another: hands everything on. What a subclass adds, it overrides."""

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
