"""What is asked of CUDA's runtime and driver beside torch: registered host memory, attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulated_gpu.machine import Machine
from simulated_gpu.races import RaceError

_CAN_READ_AT_HOST_ADDRESSES = 91


class CudaRuntime:
    """torch.cuda.cudart()."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        code = self._machine.pinned.register(address, size)
        if code:
            here = self._machine
            here.devices[here.thread.device].error = f"cudaHostRegister gave {code}"
        return code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        try:
            return self._machine.pinned.unregister(address, self._machine.host_clock)
        except RaceError as error:
            # Memory goes with its last tensor, where an error would be lost.
            raise self._machine.fault(error) from None


class _Driver:
    """libcuda, as far as it is asked."""

    @staticmethod
    def cuDeviceGetAttribute(value: Any, attribute: int, device: int) -> int:  # noqa: N802
        value._obj.value = int(attribute == _CAN_READ_AT_HOST_ADDRESSES)
        return 0


def library(original: Callable) -> Callable:
    """ctypes.CDLL, which finds a driver."""

    def load(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "libcuda.so.1":
            return _Driver()
        return original(name, *args, **kwargs)

    return load
