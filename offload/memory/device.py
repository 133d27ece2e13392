"""Device memory as a budget, through which the runtime allocates everything on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import psutil
import torch

from triforce_offload.errors import (
    DeviceFailedError,
    DoesNotFitError,
    OutOfDeviceMemoryError,
    UsageError,
)
from triforce_offload.link.waiting import hangs
from triforce_offload.machine.profiles import EMULATED
from triforce_offload.memory.available import LIBRARY_BYTES, available_host_bytes, lendable_bytes
from triforce_offload.units import format_bytes

# Errors raised when the device has no memory left, although the budget has.
OUT_OF_MEMORY = (torch.OutOfMemoryError, OutOfDeviceMemoryError)
_REMEDY = "use a shorter context or more device memory"


@dataclass
class Allocation:
    """Bytes of the budget; `bytes` is the flat uint8 tensor, or None for a reservation."""

    size: int
    purpose: str
    bytes: torch.Tensor | None


class DeviceMemory:
    """The device's memory up to a limit, counted by purpose.

    On CUDA the limit also caps PyTorch's allocator, and the peak is the allocator's own. On the CPU
    the budget is only counted: buffers are really allocated, and temporaries are covered by
    reservations whose sizes the tests compare with the allocator's trace.
    """

    def __init__(
        self, device: torch.device, limit_bytes: int | None, registered_bytes: int = 0
    ) -> None:
        """limit_bytes: size of the budget; None for the free memory, less what the process needs
        besides
        registered_bytes: upper bound of the host memory that the device will read

        Raises UsageError for a limit above the device's memory.
        """
        self.device = device
        self._used: dict[str, int] = {}
        self._used_bytes = 0
        self._peak_bytes = 0
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(device)
            free = lendable_bytes(free, registered_bytes)
        else:
            free, total = available_host_bytes(), psutil.virtual_memory().total
        if limit_bytes is not None and limit_bytes > total:
            raise UsageError(
                f"{device} has {format_bytes(total)}, less than the "
                f"{format_bytes(limit_bytes)} of device memory asked for"
            )
        self.limit_bytes = free if limit_bytes is None else limit_bytes
        if cuda:
            # Memory that the process already uses, e.g. for another engine, is not part of this
            # budget.
            self._others_bytes = torch.cuda.memory_allocated(device)
            cap = torch.cuda.memory_reserved(device) + self.limit_bytes
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
            torch.cuda.reset_peak_memory_stats(device)
            self.reserve(LIBRARY_BYTES, "CUDA libraries")

    @property
    def available_bytes(self) -> int:
        return self.limit_bytes - self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once: counted on the CPU, the allocator's number on CUDA."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._others_bytes
        return self._peak_bytes

    def allocate(self, size: int, purpose: str) -> Allocation:
        """Allocate `size` bytes of device memory, 64-byte aligned. Raises DoesNotFitError."""
        allocation = self.reserve(size, purpose)
        try:
            allocation.bytes = torch.empty(size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            self.free(allocation)
            raise OutOfDeviceMemoryError(
                f"allocating {format_bytes(size)} for {purpose}"
            ) from error
        return allocation

    def reserve(self, size: int, purpose: str) -> Allocation:
        """Count `size` bytes that temporaries will use. Raises DoesNotFitError."""
        if size > self.available_bytes:
            raise DoesNotFitError(
                f"device memory for {purpose}", size, self.available_bytes, _REMEDY
            )
        self._used[purpose] = self._used.get(purpose, 0) + size
        self._used_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return Allocation(size, purpose, None)

    def free(self, allocation: Allocation) -> None:
        """Return an allocation or reservation to the budget. A tensor goes with its last view."""
        self._used[allocation.purpose] -= allocation.size
        self._used_bytes -= allocation.size
        allocation.bytes = None
        allocation.size = 0

    def trim(self) -> None:
        """Return torch's unused memory to the device, so that tensors of other sizes fit."""
        if self.device.type == "cuda" and not hangs(self.device):
            torch.cuda.empty_cache()

    def current(self) -> AbstractContextManager:
        """Return a context in which the device is this thread's current one: Triton launches on
        that device, and events are recorded on its streams.
        """
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Convert torch's errors for a full or failing device into errors of this package."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemoryError(str(error).splitlines()[0]) from error
        except torch.AcceleratorError as error:
            why = str(error).splitlines()[0]
            raise DeviceFailedError(f"{self.device} failed: {why}") from error

    def close(self) -> None:
        """Return the allocator's cache to the device and remove the cap."""
        if self.device.type == "cuda":
            self.trim()
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def by_purpose(self) -> dict[str, int]:
        return {purpose: size for purpose, size in self._used.items() if size}


def put(
    numbers: Sequence[int] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy numbers from the host to the device, without waiting for its computation."""
    here = torch.as_tensor(numbers, dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def device_name(device: torch.device) -> str:
    """Return the name of the card as its driver reports it, or of the emulated device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else EMULATED
