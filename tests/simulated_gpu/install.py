"""Puts the simulated machine in the place of what torch.cuda offers, and takes it away again."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._device import _device_constructors

# These register what calls on a device's tensors do.
from simulated_gpu import attention, transfers  # noqa: F401
from simulated_gpu.capture import Capture, Graph
from simulated_gpu.collectives import collected
from simulated_gpu.driver import CudaRuntime, library
from simulated_gpu.factories import Generator, moved, on_device, pinned
from simulated_gpu.interpreter import interpreted
from simulated_gpu.machine import Machine, rtx_4090
from simulated_gpu.order import LOCK, Adversary, Event, Stream, UsedStream

_MEMORY_BYTES = 24 << 30
_MULTIPROCESSORS = 128
# What makes tensors by the example of one, besides factories.
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


@contextmanager
def simulated(
    adversary: Adversary = Adversary.LATE,
    *,
    gpus: int = 1,
    seed: int = 0,
    memory_bytes: int = _MEMORY_BYTES,
    multiprocessors: int = _MULTIPROCESSORS,
    strict: bool = False,
) -> Iterator[Machine]:
    """Inside, `torch.cuda` finds GPUs. Gives the machine, whose `faults` should be none after.

    adversary: when copies are made; seed: of its coin
    strict: whether the host may read what a device computes only once an event said it is there,
        since a read that waits by itself cannot be given a limit
    multiprocessors: of a card; kernels divide their work by them, which takes the interpreter time
    """
    card = rtx_4090(memory_bytes, multiprocessors)
    machine = Machine(card, gpus, adversary, seed, strict=strict)
    with ExitStack() as stack:
        stack.enter_context(machine)
        stack.enter_context(interpreted())
        stack.enter_context(collected())
        for name, value in _cuda(machine).items():
            stack.enter_context(patch.object(torch.cuda, name, value, create=True))
        for function in _device_constructors():
            if getattr(torch, function.__name__, None) is function:
                made = on_device(function)
                stack.enter_context(patch.object(torch, function.__name__, made))
        for home, names in ((torch, _LIKE), (torch.Tensor, _NEW)):
            for name in names:
                made = on_device(getattr(home, name))
                stack.enter_context(patch.object(home, name, made))
        tensor = torch.Tensor
        stack.enter_context(patch.object(torch, "Generator", Generator))
        stack.enter_context(patch.object(tensor, "to", moved(tensor.to)))
        stack.enter_context(patch.object(tensor, "cuda", moved(tensor.cuda)))
        stack.enter_context(patch.object(tensor, "pin_memory", pinned))
        stack.enter_context(patch.object(tensor, "is_pinned", _is_pinned(machine)))
        stack.enter_context(patch.object(ctypes, "CDLL", library(ctypes.CDLL)))
        try:
            yield machine
        finally:
            # Host memory is unregistered with its last tensor: while there is somebody to ask.
            gc.collect()


def _is_pinned(machine: Machine) -> Any:
    def is_pinned(tensor: torch.Tensor, *_: object) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        return not tensor.is_cuda and machine.pinned.log(tensor.data_ptr(), nbytes) is not None

    return is_pinned


class _UsedDevice:
    """torch.cuda.device."""

    def __init__(self, machine: Machine, device: object) -> None:
        self._thread = machine.thread
        self._index = machine.index_of(device)

    def __enter__(self) -> None:
        self._before, self._thread.device = self._thread.device, self._index

    def __exit__(self, *_: object) -> None:
        self._thread.device = self._before


def _cuda(machine: Machine) -> dict[str, Any]:
    """Names of torch.cuda."""

    def of(device: object) -> Any:
        return machine.devices[machine.index_of(device)]

    def cap(fraction: float, device: object = None) -> None:
        it = of(device)
        it.cap_bytes = int(fraction * it.total_bytes)

    def reset_peaks(device: object = None) -> None:
        it = of(device)
        it.peak_bytes, it.peak_reserved_bytes = it.used_bytes, it.reserved_bytes

    def set_device(device: object) -> None:
        machine.thread.device = machine.index_of(device)

    def trim() -> None:
        with LOCK:
            for device in machine.devices:
                device.trim()

    return {
        "CUDAGraph": Graph,
        "Event": Event,
        "Stream": Stream,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "_lazy_init": lambda: None,
        "cudart": lambda: CudaRuntime(machine),
        "current_device": lambda: machine.thread.device,
        "current_stream": machine.current_stream,
        "default_stream": machine.default_stream,
        "device": lambda device: _UsedDevice(machine, device),
        "device_count": lambda: len(machine.devices),
        "empty_cache": trim,
        "get_device_capability": lambda device=None: (
            of(device).properties.major,
            of(device).properties.minor,
        ),
        "get_device_name": lambda device=None: of(device).properties.name,
        "get_device_properties": lambda device=None: of(device).properties,
        "graph": Capture,
        "graph_pool_handle": lambda: (0, 1),
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: machine.capturing is not None,
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda device=None: of(device).peak_bytes,
        "max_memory_reserved": lambda device=None: of(device).peak_reserved_bytes,
        "mem_get_info": lambda device=None: (of(device).free_bytes, of(device).total_bytes),
        "memory_allocated": lambda device=None: of(device).used_bytes,
        "memory_reserved": lambda device=None: of(device).reserved_bytes,
        "reset_peak_memory_stats": reset_peaks,
        "set_device": set_device,
        "set_per_process_memory_fraction": cap,
        "stream": UsedStream,
        "synchronize": machine.synchronize,
    }
