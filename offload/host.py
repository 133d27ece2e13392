"""Host memory that streams: page-aligned, exactly sized, registered with a driver if there is one.

PyTorch's pinned allocator rounds each block up to a power of two (33 GiB would cost 64), so the
stores never use it.
"""

from __future__ import annotations

import mmap
import warnings
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from .errors import DoesNotFitError
from .units import format_bytes

_ARENA_BYTES = 1 << 30
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device

_CGROUP = Path("/sys/fs/cgroup")


class HostArena:
    """One anonymous mapping as a flat uint8 tensor, registered for direct copies when asked.

    Registering that fails (WSL2 and containers cap it) leaves the memory pageable, which is slower
    and never wrong, and says so in a warning with the size.
    """

    def __init__(self, size: int, *, pin: bool) -> None:
        """Raises DoesNotFitError."""
        available = available_host_bytes()
        if size > available:
            raise DoesNotFitError(
                "host memory for streamed weights and KV",
                size,
                available,
                "use a shorter context, a smaller model or more device memory",
            )
        mapping = _Mapping(-1, max(size, 1))
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)[:size]
        self.pinned = pin and size > 0 and mapping.register(self.bytes.data_ptr(), size)

    def close(self) -> None:
        """Lets go of the memory: it is unregistered and unmapped with the last tensor of it."""
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Mapping(mmap.mmap):
    """A mapping that is never unmapped while registered, whoever holds the last view of it.

    Pages that the driver still believes pinned would make it copy from memory that is gone.
    """

    _registered_at: int | None = None

    def register(self, address: int, size: int) -> bool:
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        if code == 0:
            self._registered_at = address
            return True
        _clear_cuda_error()
        warnings.warn(
            f"the driver would not pin {format_bytes(size)} of host memory (error {code}); "
            "it stays pageable and the link will be slower",
            RuntimeWarning,
            stacklevel=4,
        )
        return False

    def __del__(self) -> None:
        if self._registered_at is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered_at)


def _clear_cuda_error() -> None:
    """The runtime keeps the error of a failed call for the next kernel's check: let one have it."""
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(1)


class HostBlocks:
    """Equal blocks of host memory, taken one at a time from arenas of 1 GiB at most.

    A block given back is handed out again, so the requests of one engine share the same memory.
    """

    def __init__(self, block_bytes: int, *, pin: bool) -> None:
        self._block_bytes = block_bytes
        self._pin = pin
        self._arenas: list[HostArena] = []
        self._free: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(arena.bytes.numel() for arena in self._arenas)

    def provide(self, blocks: int) -> None:
        """Makes `blocks` blocks available, so that `take` allocates none.

        Raises DoesNotFitError.
        """
        most = max(1, _ARENA_BYTES // self._block_bytes)
        while (missing := blocks - len(self._free)) > 0:
            arena = HostArena(min(missing, most) * self._block_bytes, pin=self._pin)
            self._arenas.append(arena)
            self._free.extend(arena.bytes.split(self._block_bytes))

    def take(self) -> torch.Tensor:
        """A flat uint8 block, its contents unspecified. Raises DoesNotFitError."""
        self.provide(1)
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
