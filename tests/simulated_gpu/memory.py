"""Bytes of a simulated device up to its cap, and which host memory is pinned."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
import torch

from simulated_gpu.order import LOCK, Stream
from simulated_gpu.races import Access, AccessLog, RaceError

# CUDA's allocator of PyTorch rounds to these, and a context takes so much beside it.
_ROUNDING = 512
_CONTEXT_BYTES = 400 << 20
_PAGE = 4096


class Allocation:
    """Memory of a device; it is given back when the last tensor of it goes.

    stream: on which it was asked for, and will be handed out again
    graph: that holds its bytes for its replays, None for memory of the allocator
    """

    def __init__(
        self,
        device: Device,
        storage: torch.UntypedStorage,
        stream: Stream,
        graph: object | None,
    ) -> None:
        self.device = device
        self.stream = stream.index
        self.start = storage.data_ptr()
        self.nbytes = storage.nbytes()
        self.size = -(-self.nbytes // _ROUNDING) * _ROUNDING
        self.log = AccessLog()
        self.graph = graph
        self._storage = storage
        device.take(self)

    def __del__(self) -> None:
        self.device.give_back(self)


class Device:
    """One simulated GPU: its properties, and the memory that PyTorch's allocator counts."""

    def __init__(self, index: int, properties: object) -> None:
        self.index = index
        self.properties = properties
        self.total_bytes: int = properties.total_memory
        self.used_bytes = self.peak_bytes = self.reserved_bytes = self.peak_reserved_bytes = 0
        self.cap_bytes = self.total_bytes
        # What the runtime keeps for the next kernel's check.
        self.error: str | None = None
        self._allocations: weakref.WeakValueDictionary[int, Allocation] = (
            weakref.WeakValueDictionary()
        )
        # Uses of memory that was given back, by the stream that it will be handed out to again.
        self._unfinished: dict[int, list[Access]] = {}

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - _CONTEXT_BYTES - self.reserved_bytes)

    def find(self, tensor: torch.Tensor) -> Allocation | None:
        """The allocation that a tensor of CPU memory stands for."""
        return self._allocations.get(tensor.untyped_storage().data_ptr())

    def holding(self, address: int) -> Allocation | None:
        """The allocation that an address lies in."""
        for allocation in list(self._allocations.values()):
            if allocation.start <= address < allocation.start + allocation.nbytes:
                return allocation
        return None

    def check_room(self, nbytes: int) -> None:
        """Raises torch.OutOfMemoryError."""
        size = -(-nbytes // _ROUNDING) * _ROUNDING
        most = min(self.cap_bytes, self.total_bytes - _CONTEXT_BYTES)
        if self.used_bytes + size > most:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU {self.index} has "
                f"{self.used_bytes} of {most} bytes in use."
            )

    def take(self, allocation: Allocation) -> None:
        self._allocations[allocation.start] = allocation
        self.used_bytes += allocation.size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.reserved_bytes = max(self.reserved_bytes, self.used_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def check_reuse(self, stream: Stream) -> None:
        """An allocation may get any memory that the same stream gave back: others must have
        finished with it.

        Raises RaceError.
        """
        left = [
            access
            for access in self._unfinished.pop(stream.index, ())
            if stream.clock.get(access.stream, 0) < access.tick
        ]
        if left:
            raise RaceError(
                f"memory that {left[0].what} on stream {left[0].stream} may still use was given "
                f"back, and stream {stream.index} gets it again"
            )

    def give_back(self, allocation: Allocation) -> None:
        with LOCK:
            self.used_bytes -= allocation.size
            newest = allocation.log.last_of_each_stream()
            newest.pop(allocation.stream, None)
            if newest and allocation.graph is None:
                self._unfinished.setdefault(allocation.stream, []).extend(newest.values())

    def trim(self) -> None:
        self.reserved_bytes = self.used_bytes


class PinnedMemory:
    """Host memory that a device may copy and read by itself.

    Memory is registered by address, as cudaHostRegister has it, or made so by `pin_memory`.
    """

    def __init__(self) -> None:
        self._regions: dict[int, tuple[int, AccessLog]] = {}
        self._starts: list[int] = []

    def register(self, address: int, size: int) -> int:
        """0, or an error code of the runtime."""
        with LOCK:
            if size <= 0 or address % _PAGE or size > 1 << 46:
                return 1
            if any(
                address < start + length and start < address + size
                for start, (length, _) in self._regions.items()
            ):
                return 712
            self._add(address, size)
            return 0

    def unregister(self, address: int, seen: Mapping[int, int]) -> int:
        """Raises RaceError if a copy may still use the memory. seen: what the host has seen done"""
        with LOCK:
            if address not in self._regions:
                return 713
            _, log = self._regions[address]
            for access in log.last_of_each_stream().values():
                if seen.get(access.stream, 0) < access.tick:
                    raise RaceError(
                        f"host memory was unregistered while {access.what} on stream "
                        f"{access.stream} may use it"
                    )
            self._remove(address)
            return 0

    def pinned(self, nbytes: int) -> np.ndarray:
        """Bytes that are pinned as long as something refers to them."""
        raw = np.zeros(max(nbytes, 1), np.uint8)
        address = raw.ctypes.data
        with LOCK:
            self._add(address, raw.nbytes)
        weakref.finalize(raw, self._forget, address)
        return raw

    def log(self, address: int, nbytes: int) -> AccessLog | None:
        """Of the region that holds all of these bytes; None if they are pageable."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        start = self._starts[place]
        length, log = self._regions[start]
        return log if address + nbytes <= start + length else None

    def _add(self, address: int, size: int) -> None:
        self._regions[address] = (size, AccessLog())
        self._starts = sorted(self._regions)

    def _remove(self, address: int) -> None:
        del self._regions[address]
        self._starts = sorted(self._regions)

    def _forget(self, address: int) -> None:
        with LOCK:
            self._regions.pop(address, None)
            self._starts = sorted(self._regions)
