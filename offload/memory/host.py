"""Host memory that streams: page-aligned, exactly sized, registered with a driver if there is one.

PyTorch's pinned allocator rounds each block up to a power of two (33 GiB would cost 64), so the
stores never use it.
"""

from __future__ import annotations

import mmap
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from triforce_offload.errors import DoesNotFitError
from triforce_offload.link.waiting import hangs
from triforce_offload.memory.available import available_host_bytes
from triforce_offload.memory.touch import touch
from triforce_offload.units import format_bytes

# Bytes registered at once, at most. Small pieces use up nearly all that a driver's cap leaves.
PIECE_BYTES = 1 << 30


class Driver(Protocol):
    """Registers host memory, so that it can be copied without the processor.

    Both calls return 0 or an error code.
    """

    def register(self, address: int, size: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CudaDriver:
    """cudaHostRegister, called on one device for every device of the process."""

    # Mapped, because kernels read the memory too: see `kv/direct`.
    _PORTABLE_AND_MAPPED = 1 | 2

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> int:
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            code = int(runtime.cudaHostRegister(address, size, self._PORTABLE_AND_MAPPED))
        if code:
            # The runtime keeps the error for the next kernel's check, so launch a kernel that takes
            # it.
            with suppress(RuntimeError):
                torch.empty(1, device=self._device).fill_(1)
        return code

    def unregister(self, address: int) -> int:
        # Called when the last tensor is freed, from whichever thread that is.
        if hangs(self._device):
            # The driver would wait for copies that may never end. The process ends soon.
            return 0
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostUnregister(address))


def check_available(size: int, what: str) -> None:
    """Raise DoesNotFitError if `size` bytes of host memory are not available."""
    available = available_host_bytes()
    if size > available:
        raise DoesNotFitError(
            what,
            size,
            available,
            "use a shorter context, a smaller model or more device memory",
        )


class HostMemory:
    """The host memory of one engine, and which of it the link may copy directly.

    If there is a driver, arenas are registered with it until it refuses (WSL2, Windows and
    containers cap it). Later arenas stay pageable, which is slower and never wrong, and one warning
    reports how much was pinned. Without a driver, as with an emulated link, all memory is direct.

    nbytes: bytes of all open arenas
    pinned_bytes, pageable_bytes: bytes of these that are pinned and pageable, if there is a driver
    """

    def __init__(
        self, driver: Driver | None = None, *, pin: bool = True, cpus: Sequence[int] = ()
    ) -> None:
        """pin: whether arenas are registered by default
        cpus: processors near the device, which first touch memory; any processors if empty
        """
        self.nbytes = self.pinned_bytes = self.pageable_bytes = 0
        self._driver = driver
        self._pin = pin
        self._cpus = tuple(cpus)
        self._refused = False
        # Start and end of registered memory, sorted.
        self._direct: list[tuple[int, int]] = []

    def arena(self, size: int, *, pin: bool | None = None) -> HostArena:
        """Allocate `size` bytes, touched, and registered if `pin`. Raises DoesNotFitError."""
        what = "host memory for streamed weights and KV"
        check_available(size, what)
        try:
            mapping = _Mapping(size)
        except OSError as error:
            # The machine has memory left, but this process is not allowed to map it.
            remedy = f"the system lets this process map no more ({error.strerror}): see ulimit -v"
            raise DoesNotFitError(what, size, 0, remedy) from error
        touch(mapping.address, mapping.size, self._cpus)
        self.nbytes += size
        if self._driver and (pin or (pin is None and self._pin and not self._refused)):
            self._register(mapping)
        elif self._driver:
            self.pageable_bytes += size
        return HostArena(mapping, self)

    def is_direct(self, memory: torch.Tensor) -> bool:
        """Return whether the link may copy this memory of an arena without the processor."""
        if self._driver is None:
            return True
        _, end = self._registered(memory)
        return memory.data_ptr() + memory.numel() <= end

    def copies(self, memory: torch.Tensor) -> list[int]:
        """Return the sizes of the copies that bring this memory over the link: a copy may not cross
        from one registered piece to the next.
        """
        start, end = self._registered(memory)
        sizes, left, address = [], memory.numel(), memory.data_ptr()
        if address + left > end:
            return [left]
        while left:
            size = min(left, PIECE_BYTES - (address - start) % PIECE_BYTES)
            sizes.append(size)
            left, address = left - size, address + size
        return sizes

    def _registered(self, memory: torch.Tensor) -> tuple[int, int]:
        """Return start and end of the registered memory that has the first byte, or the last such
        memory before it; zeros if there is none.
        """
        place = bisect_right(self._direct, (memory.data_ptr(), 1 << 64)) - 1
        return self._direct[place] if place >= 0 else (0, 0)

    def _register(self, mapping: _Mapping) -> None:
        code = mapping.register(self._driver)
        if code:
            self.pageable_bytes += mapping.size
            if not self._refused:
                self._refused = True
                warnings.warn(
                    f"the driver pinned {format_bytes(self.pinned_bytes)} of host memory and would "
                    f"not pin {format_bytes(mapping.size)} more (error {code}); what follows stays "
                    "pageable, and copies of it go through a small pinned buffer",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return
        self.pinned_bytes += mapping.size
        span = (mapping.address, mapping.address + mapping.size)
        self._direct.insert(bisect_right(self._direct, span), span)

    def _forget(self, mapping: _Mapping) -> None:
        self.nbytes -= mapping.size
        span = (mapping.address, mapping.address + mapping.size)
        if span in self._direct:
            self._direct.remove(span)
            self.pinned_bytes -= mapping.size
        elif self._driver:
            self.pageable_bytes -= mapping.size


class HostArena:
    """One anonymous mapping as a flat uint8 tensor, `bytes`. Created by HostMemory."""

    def __init__(self, mapping: _Mapping, memory: HostMemory) -> None:
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)[: mapping.size]
        self.pinned = mapping.registered
        self._mapping: _Mapping | None = mapping
        self._memory = memory

    def close(self) -> None:
        """Drop the memory: it is unregistered and unmapped with the last tensor that views it."""
        if self._mapping is not None:
            self._memory._forget(self._mapping)
            self._mapping = None
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Mapping(mmap.mmap):
    """A mapping that is never unmapped while registered, whatever has the last view of it.

    If the driver still treated unmapped pages as pinned, it would copy from memory that no longer
    exists.
    """

    _pieces: Sequence[int] = ()
    _driver: Driver | None = None

    def __new__(cls, size: int) -> _Mapping:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = super().__new__(cls, -1, max(size, 1), flags=flags)
        mapping.size = size
        # A tensor keeps the mapping alive, so the address is read from a temporary one.
        mapping.address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        return mapping

    @property
    def registered(self) -> bool:
        return bool(self._pieces)

    def register(self, driver: Driver) -> int:
        """Register the whole mapping in pieces, or nothing. Return 0 or the driver's error code."""
        self._driver = driver
        done: list[int] = []
        for offset in range(0, self.size, PIECE_BYTES):
            address = self.address + offset
            code = driver.register(address, min(PIECE_BYTES, self.size - offset))
            if code:
                for earlier in done:
                    driver.unregister(earlier)
                return code
            done.append(address)
        self._pieces = done
        return 0

    def __del__(self) -> None:
        for address in self._pieces:
            self._driver.unregister(address)


class HostBuffers:
    """Buffers of given sizes in arenas of one piece; a larger buffer has its own arena."""

    def __init__(self, sizes: Sequence[int], memory: HostMemory) -> None:
        """Raises DoesNotFitError before any buffer is allocated, if they will not fit."""
        check_available(sum(sizes), "host memory for streamed weights")
        groups: list[list[int]] = []
        for size in sizes:
            if not groups or sum(groups[-1]) + size > PIECE_BYTES:
                groups.append([])
            groups[-1].append(size)
        self.buffers: list[torch.Tensor] = []
        self._arenas: list[HostArena] = []
        try:
            for group in groups:
                if not sum(group):
                    self.buffers.extend(torch.empty(0, dtype=torch.uint8) for _ in group)
                    continue
                arena = memory.arena(sum(group))
                self._arenas.append(arena)
                self.buffers.extend(arena.bytes.split(group))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.buffers.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


class HostBlocks:
    """Equal blocks of host memory, taken one at a time from arenas of one piece each.

    Arenas are allocated as blocks are taken, up to the number of reserved blocks. A block given
    back is reused, so the requests of one engine share the same memory. No block crosses the edge
    of a piece, except blocks that are larger than a piece: these have an arena of their own.
    """

    def __init__(self, block_bytes: int, memory: HostMemory) -> None:
        self._block_bytes = block_bytes
        self._memory = memory
        self._arenas: list[HostArena] = []
        self._free: list[torch.Tensor] = []
        self._reserved = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.bytes.numel() for arena in self._arenas)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the blocks that are in use."""
        return self.nbytes - len(self._free) * self._block_bytes

    def reserve(self, blocks: int) -> None:
        """Announce that `blocks` blocks will be taken. Raises DoesNotFitError without room for
        them.
        """
        missing = max(0, blocks - len(self._free)) * self._block_bytes
        check_available(missing, "host memory for the KV of this request")
        self._reserved = blocks

    def make_room(self, blocks: int) -> None:
        """Make `blocks` more blocks available than were reserved. Raises DoesNotFitError."""
        check_available(max(0, blocks - len(self._free)) * self._block_bytes, "host memory for KV")
        reserved, self._reserved = self._reserved, self._reserved + blocks
        try:
            while len(self._free) < blocks:
                self._make()
        except BaseException:
            self._reserved = reserved
            raise

    def take(self) -> torch.Tensor:
        """Return a flat uint8 block with unspecified contents. Raises DoesNotFitError."""
        if not self._free:
            self._make()
        self._reserved = max(0, self._reserved - 1)
        return self._free.pop()

    def give_back(self, block: torch.Tensor) -> None:
        self._free.append(block)

    def _make(self) -> None:
        most = max(1, PIECE_BYTES // self._block_bytes)
        count = min(most, max(1, self._reserved - len(self._free)))
        arena = self._memory.arena(count * self._block_bytes)
        self._arenas.append(arena)
        # The last block of the list is taken first: it is reversed, so that blocks are taken in
        # order.
        self._free.extend(reversed(arena.bytes.split(self._block_bytes)))

    def close(self) -> None:
        self._free.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
