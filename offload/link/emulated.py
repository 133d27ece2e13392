"""An emulated link for machines without a GPU: one paced copy thread per direction."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from triforce_offload.errors import LinkError
from triforce_offload.kv.sizes import COPY_BYTES
from triforce_offload.link.link import LinkCounters

# Distance of the NaNs in int32 words: every 256-byte-aligned part of a slot has one.
_POISON_STRIDE = 64
# Approximate copy rate of one thread. A low guess is safe: it changes when a copy works within its
# time on the link, and not that time.
_HOST_COPY_BYTES_PER_SECOND = 4e9


class _Event:
    """An event that is done at `seconds` (of time.perf_counter), or failed with `error`.

    began: when its copy began to cross; equal to `seconds` if it is not the event of a copy
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.began = self.seconds = 0.0
        self.error: BaseException | None = None


class EmulatedLink:
    """Copies between two parts of host memory, one of which stands for the device.

    Invariants, and why they hold:
    - A device slot reads as NaN from the call of `to_device` until its copy is complete: the call
      itself writes a NaN into every 256 bytes (0xFFFF.. in float32, float16 and bfloat16 alike),
      and the copy is made only at the end of the time it takes. A missing wait therefore shows as
      NaN.
    - Pacing follows a virtual clock, `start = max(link free, asked for, after)`, so a thread that
      wakes late delays one copy and not the ones behind it.
    - Compute on the CPU is synchronous, so `record` returns an event that has already happened.
    """

    emulated = True
    copy_bytes = COPY_BYTES

    def __init__(self, bandwidth: float | None = None, timeout_seconds: float = 60.0) -> None:
        """bandwidth: bytes per second in each direction; None for the speed of memory."""
        self.bandwidth = bandwidth
        self._timeout = timeout_seconds
        self._stalled = False
        self._directions = (_Direction(bandwidth), _Direction(bandwidth))

    def to_device(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        after: Sequence[_Event],
        what: Hashable = None,
    ) -> _Event:
        words = device[: device.numel() // 4 * 4].view(torch.int32)
        words[::_POISON_STRIDE] = -1
        return self._directions[0].copy(device, host, after)

    def to_host(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        after: Sequence[_Event],
        what: Hashable = None,
    ) -> _Event:
        return self._directions[1].copy(host, device, after)

    def record(self) -> _Event:
        event = _Event()
        event.began = event.seconds = time.perf_counter()
        event.done.set()
        return event

    def wait(self, event: _Event) -> None:
        self._wait_until_done(event)
        if event.error is not None:
            raise LinkError(f"a transfer failed: {event.error}") from event.error

    def wait_on_host(self, event: _Event) -> None:
        self.wait(event)

    def keep_times(self) -> None:
        """Link.keep_times: here every event has its times."""

    def span(self, event: _Event) -> tuple[float, float]:
        self.wait(event)
        return event.began, event.seconds

    def counters(self) -> LinkCounters:
        to_device, to_host = self._directions
        return LinkCounters(to_device.bytes, to_host.bytes, to_device.busy_seconds)

    def synchronize(self) -> None:
        for direction in self._directions:
            self._wait_until_done(direction.last)
        for error in [direction.take_error() for direction in self._directions]:
            if error is not None:
                raise LinkError(f"a transfer failed: {error}") from error

    def close(self) -> None:
        for direction in self._directions:
            direction.close()

    def _wait_until_done(self, event: _Event) -> None:
        # After one timeout the link counts as broken: every copy that is not done fails at once.
        if not event.done.wait(0 if self._stalled else self._timeout):
            self._stalled = True
            raise LinkError(f"a transfer did not finish within {self._timeout:g} seconds")


class _Direction:
    """One direction of the link: a queue of copies and the thread that makes them."""

    def __init__(self, bandwidth: float | None) -> None:
        self._bandwidth = bandwidth
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._free_at = 0.0
        self.bytes = 0
        self.busy_seconds = 0.0
        self._error: BaseException | None = None
        self.last = _Event()
        self.last.done.set()
        self._thread = threading.Thread(target=self._run, name="emulated-link", daemon=True)
        self._thread.start()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[_Event]) -> _Event:
        if target.numel() != source.numel():
            raise ValueError(f"copy of {source.numel()} bytes into {target.numel()}")
        self.last = _Event()
        # The numpy views keep both buffers alive until the copy is made.
        job = (target.numpy(), source.numpy(), tuple(after), time.perf_counter(), self.last)
        self._jobs.put(job)
        return self.last

    def take_error(self) -> BaseException | None:
        """Return the last failure since the previous call."""
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            *copy, event = job
            try:
                self._copy(*copy, event)
            except BaseException as error:
                event.error = self._error = error
            # Those who wait for the event may free the memory.
            del job, copy
            event.done.set()

    def _copy(
        self,
        target: np.ndarray,
        source: np.ndarray,
        after: tuple[_Event, ...],
        asked_at: float,
        event: _Event,
    ) -> None:
        for earlier in after:
            earlier.done.wait()
            if earlier.error is not None:
                raise earlier.error
        start = max(self._free_at, asked_at, *(earlier.seconds for earlier in after))
        if self._bandwidth is None:
            start = max(start, time.perf_counter())
            np.copyto(target, source)
            end = time.perf_counter()
        else:
            end = start + target.nbytes / self._bandwidth
            # The copy itself runs in the last part of its time on the link.
            _sleep_until(end - target.nbytes / _HOST_COPY_BYTES_PER_SECOND)
            np.copyto(target, source)
            _sleep_until(end)
        event.began = start
        self._free_at = event.seconds = end
        self.bytes += target.nbytes
        self.busy_seconds += end - start


def _sleep_until(seconds: float) -> None:
    remaining = seconds - time.perf_counter()
    if remaining > 0:
        time.sleep(remaining)
