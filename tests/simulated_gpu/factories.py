"""Functions that make tensors: on a simulated device where they are asked to."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from simulated_gpu.machine import machine
from simulated_gpu.operators import Operations
from simulated_gpu.order import LOCK
from simulated_gpu.tensor import GpuTensor, wrap
from simulated_gpu.transfers import to, upload

# These take numbers or tensors of the host, which have to cross.
_OF_VALUES = {"tensor", "as_tensor", "asarray"}


def on_device(function: Callable) -> Callable:
    """A factory of torch that knows the simulated devices, and pinned memory."""
    name = function.__name__

    @wraps(function)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], GpuTensor):
            if name == "as_tensor" or name == "asarray":
                return to(torch.Tensor.to, args[0], **kwargs)
            return function(*args, **kwargs)
        # By the example of a tensor of the host: that of a device decides for itself.
        device = kwargs.get("device")
        if isinstance(device, int):
            device = torch.device("cuda", device)
        if device is None or torch.device(device).type != "cuda":
            if kwargs.pop("pin_memory", False):
                return pinned(function(*args, **kwargs))
            return function(*args, **kwargs)
        index = machine().index_of(device)
        kwargs["device"] = "cpu"
        if name in _OF_VALUES:
            return upload(function(*args, **kwargs), index)
        with LOCK, Operations(machine(), index):
            # The whole device's memory and more cannot be tried on the host.
            if name == "empty" and (size := _bytes_of(args, kwargs)) is not None:
                machine().devices[index].check_room(size)
            return wrap(function(*args, **kwargs), index)

    return make


def moved(original: Callable) -> Callable:
    """Tensor.to or .cuda of a tensor of the host."""

    @wraps(original)
    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, GpuTensor):
            return original(tensor, *args, **kwargs)
        names_device = original.__name__ == "cuda" or any(
            _is_cuda(value) for value in (*args, *kwargs.values())
        )
        if not names_device:
            return original(tensor, *args, **kwargs)
        with LOCK:
            return to(original, tensor, *args, **kwargs)

    return move


def pinned(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    """A copy of a tensor of the host in pinned memory."""
    if tensor.device.type != "cpu":
        raise RuntimeError("cannot pin 'torch.cuda' tensors, only dense CPU tensors can be pinned")
    nbytes = tensor.numel() * tensor.element_size()
    raw = torch.from_numpy(machine().pinned.pinned(nbytes))[:nbytes]
    copy = raw.view(tensor.dtype).view(tensor.shape) if nbytes else tensor.clone()
    return copy.copy_(tensor)


class Generator(torch.Generator):
    """torch.Generator: one of a device draws on the CPU, and says where it is."""

    def __new__(cls, device: object = "cpu") -> torch.Generator:
        asked = torch.device(device)
        if asked.type != "cuda":
            return _ORIGINAL(device=device)
        generator = super().__new__(cls)
        generator.device_ = torch.device("cuda", machine().index_of(asked))
        return generator

    def __init__(self, device: object = "cpu") -> None:
        pass

    device = property(lambda self: self.device_)


_ORIGINAL = torch.Generator


def _is_cuda(value: Any) -> bool:
    if isinstance(value, GpuTensor):
        return True
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


def _bytes_of(args: tuple, kwargs: dict) -> int | None:
    sizes = args[0] if args and isinstance(args[0], (tuple, list, torch.Size)) else args
    if not all(isinstance(size, int) for size in sizes):
        return None
    count = 1
    for size in sizes:
        count *= size
    return count * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
