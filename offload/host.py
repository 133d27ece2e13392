"""Host memory that streams: page-aligned, exactly sized, registered with a driver if there is one.

PyTorch's pinned allocator rounds each block up to a power of two (33 GiB would cost 64), so the
stores never use it.
"""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path

import psutil
import torch

from .errors import DoesNotFitError
from .units import format_bytes

_ARENA_BYTES = 1 << 30
_BLOCKS_PER_ARENA = 64

_CGROUP = Path("/sys/fs/cgroup")


class HostArena:
    """One anonymous mapping as a flat uint8 tensor, registered for direct copies when asked.

    Registering that fails (WSL2 and containers cap it) leaves the memory pageable, which is slower
    and never wrong, and says so once in a warning with the size.
    """

    def __init__(self, size: int, *, pin: bool) -> None:
        available = available_host_bytes()
        if size > available:
            raise DoesNotFitError(
                "host memory for streamed weights and KV",
                size,
                available,
                "use a shorter context, a smaller model or more device memory",
            )
        self.bytes = torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]
        self.pinned = pin and size > 0 and self._register()

    def _register(self) -> bool:
        code = int(
            torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
        )
        if code != 0:
            warnings.warn(
                f"the driver would not pin {format_bytes(self.bytes.numel())} of host memory "
                f"(error {code}); it stays pageable and the link will be slower",
                RuntimeWarning,
                stacklevel=3,
            )
        return code == 0

    def close(self) -> None:
        """Unregisters; the mapping goes with the last tensor that views it."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostBlocks:
    """Equal blocks of host memory, taken one at a time from arenas that grow as needed.

    A block given back is handed out again, so the requests of one engine share the same memory.
    """

    def __init__(self, block_bytes: int, *, pin: bool) -> None:
        self._block_bytes = block_bytes
        self._pin = pin
        self._blocks_per_arena = min(max(1, _ARENA_BYTES // block_bytes), _BLOCKS_PER_ARENA)
        self._arenas: list[HostArena] = []
        self._free: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return len(self._arenas) * self._blocks_per_arena * self._block_bytes

    def take(self) -> torch.Tensor:
        """A flat uint8 block, its contents unspecified. Raises DoesNotFitError."""
        if not self._free:
            arena = HostArena(self._blocks_per_arena * self._block_bytes, pin=self._pin)
            self._arenas.append(arena)
            self._free.extend(reversed(arena.bytes.split(self._block_bytes)))
        return self._free.pop()

    def give_back(self, block: torch.Tensor) -> None:
        self._free.append(block)

    def close(self) -> None:
        self._free.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


def available_host_bytes() -> int:
    """Memory a new mapping can count on: what the machine has left, or its container if less."""
    available = psutil.virtual_memory().available
    limit = _CGROUP / "memory.max"
    if limit.exists() and limit.read_text().strip().isdigit():
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get("inactive_file", 0))
        available = min(available, max(0, int(limit.read_text()) - used + reclaimable))
    return available
