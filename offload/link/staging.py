"""Copies of pageable memory and of file contents: threads carry them through pinned rings."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress

import torch

from triforce_offload.errors import LinkError
from triforce_offload.link.link import Event, Link, OnDemand, WrappedLink
from triforce_offload.memory.host import HostMemory

_BUFFERS = 3
_BUFFER_BYTES = 16 << 20


class StagedLink(WrappedLink):
    """A link that takes any host memory, and bytes that are read on demand. Bytes that it cannot
    copy directly go through a ring of pinned buffers.

    The driver can copy pageable memory itself, but only while the caller waits. Here a thread does
    so instead: passes keep their order of events and the caller continues.

    Invariants, and why they hold:
    - A ring buffer is refilled only after the copy out of it is complete: the thread waits for that
      copy's event, and only its copies use the buffer.
    - Compute that waits for a staged copy waits for the event of its last part. That event exists
      only when the thread has issued the part, so `wait` first blocks the host until then.
    - Staged copies of one direction keep their order: one thread makes them.
    """

    def __init__(
        self,
        link: Link,
        memory: HostMemory,
        buffer_bytes: int = _BUFFER_BYTES,
        reading: tuple[int, int] = (0, 0),
    ) -> None:
        """reading: number of buffers for bytes that are read on demand, and bytes of each."""
        super().__init__(link)
        self._memory = memory
        self._rings = {
            "in": (_BUFFERS, buffer_bytes),
            "out": (_BUFFERS, buffer_bytes),
            "file": reading,
        }
        self._carriers: dict[str, _Carrier] = {}

    def to_device(
        self,
        device: torch.Tensor,
        host: torch.Tensor | OnDemand,
        after: Sequence[Event],
        what: Hashable = None,
    ) -> Event:
        if not isinstance(host, torch.Tensor):
            return self._carrier("file").carry(device, host, after)
        if self._memory.is_direct(host):
            return super().to_device(device, host, [_issued(event) for event in after], what)
        return self._carrier("in").carry(device, host, after)

    def to_host(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        after: Sequence[Event],
        what: Hashable = None,
    ) -> Event:
        if self._memory.is_direct(host):
            return super().to_host(host, device, [_issued(event) for event in after], what)
        return self._carrier("out").carry(device, host, after)

    def wait(self, event: Event) -> None:
        super().wait(_issued(event))

    def wait_on_host(self, event: Event) -> None:
        super().wait_on_host(_issued(event))

    def span(self, event: Event) -> tuple[float, float]:
        if not isinstance(event, _Staged):
            return super().span(event)
        event.issued()
        # From the start of the first part to the end of the last one.
        spans = [super(StagedLink, self).span(part) for part in event.parts]
        return spans[0][0], spans[-1][1]

    def synchronize(self) -> None:
        errors = [carrier.finish() for carrier in self._carriers.values()]
        self._link.synchronize()
        for error in filter(None, errors):
            raise error

    def close(self) -> None:
        for carrier in self._carriers.values():
            carrier.stop()
        # After that nothing crosses the rings any more.
        with suppress(LinkError):
            self._link.synchronize()
        for carrier in self._carriers.values():
            carrier.close()
        self._carriers.clear()
        self._link.close()

    def _carrier(self, direction: str) -> _Carrier:
        if direction not in self._carriers:
            self._carriers[direction] = _Carrier(
                self._link, self._memory, *self._rings[direction], inwards=direction != "out"
            )
        return self._carriers[direction]


class _Staged:
    """A staged copy. When `done` is set, all parts are issued, and a copy to the host is done."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.parts: list[Event] = []
        self.error: LinkError | None = None

    def issued(self) -> Event:
        """Block until all parts are issued, and return the event of the last one.

        Raises LinkError.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.parts[-1]


def _issued(event: Event) -> Event:
    return event.issued() if isinstance(event, _Staged) else event


class _Carrier:
    """One direction: a queue of copies, the thread that makes them, and its ring."""

    def __init__(
        self, link: Link, memory: HostMemory, buffers: int, buffer_bytes: int, *, inwards: bool
    ) -> None:
        self._link = link
        self._inwards = inwards
        self._arena = memory.arena(buffers * buffer_bytes, pin=True)
        self._buffers = self._arena.bytes.split(buffer_bytes)
        self._copied: list[Event | None] = [None] * buffers
        self._next = 0
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._error: LinkError | None = None
        self._last = _Staged()
        self._last.done.set()
        self._thread = threading.Thread(target=self._run, name="staging", daemon=True)
        self._thread.start()

    def carry(
        self, device: torch.Tensor, host: torch.Tensor | OnDemand, after: Sequence[Event]
    ) -> _Staged:
        self._last = _Staged()
        self._jobs.put((device, host, tuple(after), self._last))
        return self._last

    def finish(self) -> LinkError | None:
        """Wait until all copies are issued. Return the last failure since the previous call."""
        self._last.done.wait()
        error, self._error = self._error, None
        return error

    def stop(self) -> None:
        """End the thread once it has issued all copies."""
        self._jobs.put(None)
        self._thread.join()

    def close(self) -> None:
        """Free the ring. No copy may be using it."""
        self._buffers = ()
        self._arena.close()

    # Inference mode is per thread, and a request's tensors are inference tensors.
    @torch.inference_mode()
    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            device, host, after, staged = job
            try:
                self._carry(device, host, [_issued(event) for event in after], staged.parts)
            except LinkError as error:
                staged.error = self._error = error
            except BaseException as error:
                staged.error = self._error = LinkError(f"a transfer failed: {error}")
                staged.error.__cause__ = error
            staged.done.set()

    def _carry(
        self,
        device: torch.Tensor,
        host: torch.Tensor | OnDemand,
        after: list[Event],
        parts: list[Event],
    ) -> None:
        size = self._buffers[0].numel()
        host_parts = host.split(size) if isinstance(host, torch.Tensor) else (host,)
        waiting: list[tuple[torch.Tensor, int, Event]] = []
        for device_part, host_part in zip(device.split(size), host_parts, strict=True):
            place = self._next
            self._next = (place + 1) % len(self._buffers)
            buffer = self._buffers[place][: host_part.numel()]
            if self._inwards:
                if self._copied[place] is not None:
                    self._link.wait_on_host(self._copied[place])
                if isinstance(host_part, torch.Tensor):
                    buffer.copy_(host_part)
                else:
                    host_part.read(buffer)
                parts.append(self._link.to_device(device_part, buffer, after))
                self._copied[place] = parts[-1]
            else:
                if len(waiting) == len(self._buffers):
                    self._land(*waiting.pop(0))
                parts.append(self._link.to_host(buffer, device_part, after))
                waiting.append((host_part, place, parts[-1]))
        for landed in waiting:
            self._land(*landed)

    def _land(self, host_part: torch.Tensor, place: int, event: Event) -> None:
        self._link.wait_on_host(event)
        host_part.copy_(self._buffers[place][: host_part.numel()])
