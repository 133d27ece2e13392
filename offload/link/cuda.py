"""The real link: PCIe, driven by two copy streams and events."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from triforce_offload.errors import LinkError
from triforce_offload.link.link import LinkCounters
from triforce_offload.link.waiting import Patience, patience
from triforce_offload.memory.host import HostMemory

_PROBE_BYTES = 128 << 20
_PROBE_REPEATS = 3
# Sizes of a copy that the probe tries. Larger slots would take device memory and gain nothing.
_COPY_BYTES = (16 << 20, 32 << 20)
# A size is large enough if its copies reach this share of the rate of one large copy.
_NEAR_PEAK = 0.97
# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_HOST_POINTER_FOR_REGISTERED_MEMORY = 91
# Bandwidth and copy size, measured once per process: a link does not change, and KV block sizes may
# depend on them.
_PROBED: dict[torch.device, tuple[float, int]] = {}


class _Copy(NamedTuple):
    """The events around a copy on its stream."""

    started: torch.cuda.Event
    ended: torch.cuda.Event


def reads_host_memory(device: torch.device) -> bool:
    """Return whether kernels may read registered host memory at the host's own addresses."""
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    value = ctypes.c_int()
    code = driver.cuDeviceGetAttribute(
        ctypes.byref(value), _HOST_POINTER_FOR_REGISTERED_MEMORY, device.index or 0
    )
    return code == 0 and value.value == 1


class CudaLink:
    """Copies on their own streams, ordered against compute by events.

    Invariants, and why they hold:
    - A copy to the device is enqueued on `_in` behind every event of `after`; the slot's last
      reader is one of them, so nothing in use is overwritten. Compute waits for the copy's own
      event, so nothing is read before it is complete.
    - Buffers on both sides (arenas, slots, gather buffers) are returned to the caching allocator
      only when the link has been synchronised, so no `record_stream` is needed.
    - Timing events are taken from a deque in order and only queried. No call here blocks the host,
      except copies of pageable memory, and `synchronize`, `wait_on_host`, `counters` (a few times a
      request), `span` and the probe. All but the probe wait with a limit: they query the event
      repeatedly, since no wait inside the driver can be interrupted.
    - The caller waits for a copy of pageable memory, without a limit: the driver cannot make it
      later. `StagedLink` makes such copies in a thread, and only where nothing can be registered.
    - A copy may not cross from one registered piece of host memory to the next, so larger copies
      are cut where pieces end.

    bandwidth: bytes per second to the device, measured
    copy_bytes: 16 MiB if copies of that size come within 3 % of it, else 32 MiB
    """

    emulated = False

    def __init__(
        self,
        device: torch.device,
        memory: HostMemory,
        timeout_seconds: float | None = None,
    ) -> None:
        """timeout_seconds: limit of each wait, with a Patience of this link's own; None to share
        the device's.
        """
        own = timeout_seconds is not None
        self._patience = Patience(timeout_seconds) if own else patience(device)
        self._device = device
        self._memory = memory
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        # A thread that stages pageable memory calls this link too.
        self._lock = threading.Lock()
        self._running: deque[_Copy] = deque()
        self._bytes_to_device = 0
        self._bytes_to_host = 0
        self._busy_seconds = 0.0
        self._epoch: tuple[torch.cuda.Event, float] | None = None
        self.bandwidth: float | None
        if device not in _PROBED:
            _PROBED[device] = self._probe(memory)
        self.bandwidth, self.copy_bytes = _PROBED[device]

    def to_device(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        after: Sequence[_Copy | torch.cuda.Event],
        what: Hashable = None,
    ) -> _Copy:
        copy = self._copy(self._in, device, host, after, host)
        with self._lock:
            self._bytes_to_device += host.numel()
            self._running.append(copy)
            self._drain()
        return copy

    def to_host(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        after: Sequence[_Copy | torch.cuda.Event],
        what: Hashable = None,
    ) -> _Copy:
        copy = self._copy(self._out, host, device, after, host)
        with self._lock:
            self._bytes_to_host += host.numel()
        return copy

    def record(self) -> torch.cuda.Event:
        # Events have timing only while a trace needs it.
        event = torch.cuda.Event(enable_timing=self._epoch is not None)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: _Copy | torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(_end(event))

    def wait_on_host(self, event: _Copy | torch.cuda.Event) -> None:
        self._patience.wait(_end(event))

    def keep_times(self) -> None:
        epoch = torch.cuda.Event(enable_timing=True)
        epoch.record(torch.cuda.current_stream(self._device))
        self._patience.wait(epoch)
        self._epoch = (epoch, time.perf_counter())

    def span(self, event: _Copy | torch.cuda.Event) -> tuple[float, float]:
        epoch, seconds = self._epoch
        end = _end(event)
        self._patience.wait(end)
        ended = seconds + epoch.elapsed_time(end) / 1000
        if isinstance(event, _Copy):
            return seconds + epoch.elapsed_time(event.started) / 1000, ended
        return ended, ended

    def counters(self) -> LinkCounters:
        self._patience.wait(self._in.record_event())
        with self._lock:
            self._drain()
            return LinkCounters(self._bytes_to_device, self._bytes_to_host, self._busy_seconds)

    def synchronize(self) -> None:
        for stream in (self._in, self._out):
            try:
                event = stream.record_event()
            except RuntimeError as error:
                raise LinkError(f"a transfer failed: {error}") from error
            self._patience.wait(event)

    def close(self) -> None:
        # A hung device was already reported as the error that ended the run.
        if not self._patience.exhausted:
            self.synchronize()

    def _copy(
        self,
        stream: torch.cuda.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[_Copy | torch.cuda.Event],
        host: torch.Tensor,
    ) -> _Copy:
        """host: the one of `target` and `source` that is in host memory"""
        direct, sizes = self._memory.is_direct(host), self._memory.copies(host)
        copy = _Copy(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(_end(event))
            copy.started.record(stream)
            for part, given in zip(target.split(sizes), source.split(sizes), strict=True):
                part.copy_(given, non_blocking=direct)
            copy.ended.record(stream)
        return copy

    def _drain(self) -> None:
        while self._running and self._running[0].ended.query():
            copy = self._running.popleft()
            self._busy_seconds += copy.started.elapsed_time(copy.ended) / 1000

    def _probe(self, memory: HostMemory) -> tuple[float, int]:
        """Return the rate of the best of three copies of 128 MiB from registered memory, in bytes
        per second, and the smallest copy size that comes near that rate when many copies follow one
        another.
        """
        with memory.arena(_PROBE_BYTES, pin=True) as arena:
            target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=self._device)
            # The allocator may return memory that kernels of its own stream still read.
            self._in.wait_event(self.record())

            def rate(size: int) -> float:
                best = float("inf")
                # The first repeat touches the pages.
                for _ in range(_PROBE_REPEATS + 1):
                    self._in.synchronize()
                    begin = time.perf_counter()
                    with torch.cuda.stream(self._in):
                        pairs = zip(target.split(size), arena.bytes.split(size), strict=True)
                        for piece, source in pairs:
                            piece.copy_(source, non_blocking=True)
                    self._in.synchronize()
                    best = min(best, time.perf_counter() - begin)
                return _PROBE_BYTES / best

            peak = rate(_PROBE_BYTES)
            near = (size for size in _COPY_BYTES if rate(size) >= _NEAR_PEAK * peak)
            return peak, next(near, _COPY_BYTES[-1])


def _end(event: _Copy | torch.cuda.Event) -> torch.cuda.Event:
    return event.ended if isinstance(event, _Copy) else event
