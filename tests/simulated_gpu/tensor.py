"""Tensors that say `cuda:0`, each over a tensor of CPU memory that nobody else sees.

Every call on one comes here first (`__torch_function__`), is made on the CPU tensors, and its
results are tensors of the device again. Operations beneath it are seen one by one by
`operators.Operations`, which knows what each reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from simulated_gpu.machine import machine
from simulated_gpu.memory import Allocation
from simulated_gpu.operators import Operations
from simulated_gpu.order import LOCK
from simulated_gpu.races import RaceError

# Calls that may take a tensor of the host beside one of the device: indices, and copies.
_MAY_MIX = {"__getitem__", "__setitem__", "copy_", "type_as", "copy_to_host"}


class GpuTensor(torch.Tensor):
    """A tensor of a simulated device.

    inner: the tensor of CPU memory that it stands for
    """

    inner: torch.Tensor
    memory: Allocation | None

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int, memory: Allocation | None) -> GpuTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda", index),
        )
        tensor.inner = inner
        tensor.memory = memory
        tensor.index_ = index
        tensor.device_ = torch.device("cuda", index)
        return tensor

    # Asked for often, and answered without a call.
    device = property(lambda self: self.device_)
    shape = property(lambda self: self.inner.shape)
    dtype = property(lambda self: self.inner.dtype)
    ndim = property(lambda self: self.inner.dim())
    is_cuda = property(lambda self: True)

    __hash__ = object.__hash__

    def __repr__(self, **_: object) -> str:
        return f"GpuTensor({tuple(self.inner.shape)}, {self.inner.dtype}, {self.device_})"

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _attribute(func, args[0])
        special = SPECIAL.get(name)
        with LOCK:
            if special is not None:
                return special(func, *args, **(kwargs or {}))
            return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise RuntimeError(f"the simulated GPU does not know {func}")


# By name: calls that move data, wait, or ask where a tensor is; `transfers` and others fill it.
SPECIAL: dict[str, Callable] = {}


def special(*names: str) -> Callable:
    """Registers a function for calls of these names: it gets the original, then the arguments."""

    def register(function: Callable) -> Callable:
        SPECIAL.update(dict.fromkeys(names, function))
        return function

    return register


def call(func: Callable, args: tuple, kwargs: dict, device: int | None = None) -> Any:
    """Makes a call on the CPU tensors beneath, as an operation of the current stream.

    device: of the results; that of the arguments if None. Raises RuntimeError for tensors of
    several devices.
    """
    seen = _Seen()
    inner_args = seen.unwrap(args)
    inner_kwargs = seen.unwrap(kwargs)
    asked = inner_kwargs.get("device")
    if asked is not None:
        inner_kwargs["device"] = "cpu"
        asked = torch.device(asked)
        if asked.type == "cpu":
            return func(*inner_args, **inner_kwargs)
        device = machine().index_of(asked)
    index = seen.check(getattr(func, "__name__", str(func)), device)
    with Operations(machine(), index):
        result = func(*inner_args, **inner_kwargs)
        return wrap(result, index, seen.wrappers)


def wrap(result: Any, index: int, wrappers: dict[int, GpuTensor] | None = None) -> Any:
    """Tensors of CPU memory in a result as tensors of a device."""
    if isinstance(result, torch.Tensor):
        known = (wrappers or {}).get(id(result))
        if known is not None:
            return known
        return GpuTensor(result, index, allocation(result, index))
    if isinstance(result, torch.Size):
        return result
    if isinstance(result, (tuple, list)):
        parts = [wrap(each, index, wrappers) for each in result]
        if isinstance(result, list):
            return parts
        return type(result)(parts) if not hasattr(result, "_fields") else type(result)(*parts)
    return result


def allocation(inner: torch.Tensor, index: int) -> Allocation | None:
    """The memory of a tensor that an operation gave: a new one, or that of which it is a view."""
    if inner.untyped_storage().nbytes() == 0:
        return None
    here = machine()
    device = here.devices[index]
    found = device.find(inner)
    if found is None:
        stream = here.current_stream(index)
        device.check_room(inner.untyped_storage().nbytes())
        if here.capturing is None:
            try:
                device.check_reuse(stream)
            except RaceError as error:
                raise here.fault(error) from None
        found = Allocation(device, inner.untyped_storage(), stream, here.capturing)
        if stream.clock[stream.index]:
            here.use(found.log, inner, stream, writes=True, what="making it")
    return found


class _Seen:
    """The tensors of a call's arguments."""

    def __init__(self) -> None:
        self.wrappers: dict[int, GpuTensor] = {}
        self._devices: set[int] = set()
        self._host = False

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, GpuTensor):
            self._devices.add(value.index_)
            self.wrappers[id(value.inner)] = value
            return value.inner
        if isinstance(value, torch.Tensor):
            self._host |= value.dim() > 0
            return value
        if type(value) in (tuple, list):
            return type(value)(self.unwrap(each) for each in value)
        if type(value) is dict:
            return {name: self.unwrap(each) for name, each in value.items()}
        return value

    def check(self, name: str, device: int | None) -> int:
        """The one device of the arguments. Raises RuntimeError."""
        places = {f"cuda:{index}" for index in self._devices}
        if self._host and name not in _MAY_MIX:
            places.add("cpu")
        if len(places) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(places))}! (in {name})"
            )
        return device if device is not None else next(iter(self._devices))


def _attribute(func: Callable, tensor: GpuTensor) -> Any:
    name = func.__self__.__name__
    if name in ("T", "mT", "H", "mH", "data", "real", "imag"):
        return call(func, (tensor,), {})
    with torch._C.DisableTorchFunctionSubclass():
        return func(tensor)
