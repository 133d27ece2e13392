"""The real link: PCIe, driven by two copy streams and events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from .errors import LinkError
from .host import HostArena
from .link import LinkCounters

_PROBE_BYTES = 128 << 20
_PROBE_REPEATS = 3


class CudaLink:
    """Copies on their own streams, ordered against compute by events.

    Invariants, and why they hold:
    - A copy to the device is enqueued on `_in` behind every event of `after`; the slot's last
      reader is one of them, so nothing in use is overwritten. Compute waits for the copy's own
      event, so nothing is read before it is complete.
    - Buffers on both sides live until `close` (arenas, slots) and are never handed back to the
      caching allocator in between, so no `record_stream` is needed.
    - Timing events are taken from a deque in order and only queried: no call here blocks the host,
      except `synchronize`, `wait_on_host`, `counters` (once a request) and the probe.
    """

    emulated = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._bytes_to_device = 0
        self._bytes_to_host = 0
        self._busy_seconds = 0.0
        self.bandwidth: float | None = self._probe()

    def to_device(
        self, device: torch.Tensor, host: torch.Tensor, after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        started = torch.cuda.Event(enable_timing=True)
        ready = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._in):
            for event in after:
                self._in.wait_event(event)
            started.record(self._in)
            device.copy_(host, non_blocking=True)
            ready.record(self._in)
        self._bytes_to_device += host.numel()
        self._running.append((started, ready))
        self._drain()
        return ready

    def to_host(
        self, host: torch.Tensor, device: torch.Tensor, after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        done = torch.cuda.Event()
        with torch.cuda.stream(self._out):
            for event in after:
                self._out.wait_event(event)
            host.copy_(device, non_blocking=True)
            done.record(self._out)
        self._bytes_to_host += host.numel()
        return done

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def wait_on_host(self, event: torch.cuda.Event) -> None:
        try:
            event.synchronize()
        except RuntimeError as error:
            raise LinkError(f"a transfer failed: {error}") from error

    def counters(self) -> LinkCounters:
        self._in.synchronize()
        self._drain()
        return LinkCounters(self._bytes_to_device, self._bytes_to_host, self._busy_seconds)

    def synchronize(self) -> None:
        try:
            self._in.synchronize()
            self._out.synchronize()
        except RuntimeError as error:
            raise LinkError(f"a transfer failed: {error}") from error

    def close(self) -> None:
        self.synchronize()

    def _drain(self) -> None:
        while self._running and self._running[0][1].query():
            started, ready = self._running.popleft()
            self._busy_seconds += started.elapsed_time(ready) / 1000

    def _probe(self) -> float:
        """Best of three copies of 128 MiB from registered memory, in bytes per second."""
        with HostArena(_PROBE_BYTES, pin=True) as arena:
            target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=self._device)
            best = float("inf")
            for _ in range(_PROBE_REPEATS + 1):  # the first touches the pages
                self._in.synchronize()
                begin = time.perf_counter()
                with torch.cuda.stream(self._in):
                    target.copy_(arena.bytes, non_blocking=True)
                self._in.synchronize()
                best = min(best, time.perf_counter() - begin)
        return _PROBE_BYTES / best
