"""Triton's kernels on a simulated device: its interpreter runs them on the memory beneath.

Addresses are looked at too: a kernel may touch memory of its device and host memory that is
registered, each behind whatever it has to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from quick_interpreter import quicken

from simulated_gpu.machine import Machine, machine, span_of
from simulated_gpu.operators import tensors_in
from simulated_gpu.order import LOCK
from simulated_gpu.tensor import GpuTensor

_RUNNING = threading.local()


class Launch:
    """One launch under way: which of its tensors it wrote, and what else it touched."""

    def __init__(self, here: Machine, name: str, tensors: list[torch.Tensor]) -> None:
        self._machine = here
        self._name = name
        self._stream = here.current_stream()
        self._device = here.devices[here.thread.device]
        self._tensors = tensors
        self._spans = [_whole(tensor) for tensor in tensors]
        self._written: set[int] = set()
        self._stream.run()
        self._stream.tick()

    def touch(self, pointers: np.ndarray, mask: np.ndarray, size: int, *, writes: bool) -> None:
        """A load or store of one program. Raises RuntimeError for memory that is not its own."""
        used = pointers[mask.astype(bool)] if mask.shape == pointers.shape else pointers
        if not used.size:
            return
        first, last = int(used.min()), int(used.max()) + size
        for place, (start, end) in enumerate(self._spans):
            if start <= first and last <= end:
                if writes:
                    self._written.add(place)
                return
        here = self._machine
        found = self._device.holding(first)
        log = here.pinned.log(first, last - first) if found is None else found.log
        if log is None:
            raise RuntimeError(
                f"CUDA error: an illegal memory access: {self._name} uses {last - first} bytes "
                "that are neither its device's nor registered"
            )
        what = f"{self._name}, by address,"
        here.use_bytes(log, first, last, self._stream, writes=writes, what=what)

    def end(self) -> None:
        """Notes what its tensors were used for."""
        here = self._machine
        for place, tensor in enumerate(self._tensors):
            found = self._device.find(tensor)
            if found is not None:
                writes = place in self._written
                here.use(found.log, tensor, self._stream, writes=writes, what=self._name)


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, Triton's interpreter takes tensors of a simulated device."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    quicken()
    launch = interpreter.GridExecutor.__call__
    native = interpreter._interpreter

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        values = (*args, *kwargs.values())
        if not any(isinstance(value, GpuTensor) for value in values):
            launch(executor, *args, **kwargs)
            return
        with LOCK:
            _launch(executor.fn.__name__, lambda a, k: launch(executor, *a, **k), args, kwargs)

    interpreter.GridExecutor.__call__ = launched
    interpreter._interpreter = _Watched(native)
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = launch
        interpreter._interpreter = native


def _launch(name: str, run: Callable, args: tuple, kwargs: dict) -> None:
    here = machine()
    index = here.thread.device
    tensors: list[torch.Tensor] = []

    def inner(value: Any, place: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, GpuTensor):
            raise ValueError(
                f"Pointer argument (at {place}) cannot be accessed from Triton (cpu tensor?)"
            )
        if value.index_ != index:
            raise here.fault(
                AssertionError(
                    f"{name} was launched on cuda:{index} with a tensor of {value.device}"
                )
            )
        tensors.append(value.inner)
        return value.inner

    inner_args = tuple(inner(value, place) for place, value in enumerate(args))
    inner_kwargs = {key: inner(value, key) for key, value in kwargs.items()}

    def once() -> None:
        _RUNNING.launch = Launch(machine(), name, tensors)
        try:
            run(inner_args, inner_kwargs)
            _RUNNING.launch.end()
        finally:
            _RUNNING.launch = None

    if here.capturing is not None:
        here.capturing.reads(list(tensors_in(tensors)), index)
        here.capturing.add(once)
    else:
        once()


class _Watched(ModuleType):
    """The interpreter's loads and stores, seen by the launch under way in this thread."""

    def __init__(self, native: Any) -> None:
        super().__init__("watched")
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        launch = getattr(_RUNNING, "launch", None)
        if launch is not None:
            launch.touch(pointers, mask, np.dtype(dtype).itemsize, writes=False)
        return self._native.load(pointers, mask, other, dtype)

    def store(self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        launch = getattr(_RUNNING, "launch", None)
        if launch is not None:
            launch.touch(pointers, mask, value.dtype.itemsize, writes=True)
        return self._native.store(pointers, value, mask)


def _whole(tensor: torch.Tensor) -> tuple[int, int]:
    """A kernel is given an address alone, and may go as far as the memory does."""
    storage = tensor.untyped_storage()
    start, end = span_of(tensor)
    if storage.nbytes() == 0:
        return start, end
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
