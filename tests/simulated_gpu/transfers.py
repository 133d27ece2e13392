"""Copies between host and device, and what makes the host wait."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from simulated_gpu.machine import machine, span_of
from simulated_gpu.operators import Operations, use_all
from simulated_gpu.order import LOCK, Stream
from simulated_gpu.races import RaceError
from simulated_gpu.tensor import GpuTensor, allocation, call, special, wrap

# Reads as NaN in float32, float16 and bfloat16.
_POISON = 255


@special("copy_")
def copy_(
    func: Callable, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Tensor.copy_ from or to a device."""
    here = machine()
    if not isinstance(source, torch.Tensor):
        raise TypeError(f"copy_(): argument 'other' must be Tensor, not {type(source).__name__}")
    if isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
        if target.index_ == source.index_:
            return call(func, (target, source), {})
        _between_devices(target, source)
    elif isinstance(target, GpuTensor):
        _carry(target, target.inner, source, target.index_, non_blocking)
    else:
        _carry(source, target, source.inner, source.index_, non_blocking)
    if here.capturing is not None and not non_blocking:
        raise here.refusal("a copy that the host waits for")
    return target


@special("to", "cuda", "type_as")
def to(func: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.to, .cuda and .type_as."""
    name = func.__name__
    if name == "cuda":
        args = (torch.device("cuda", machine().index_of(args[0] if args else None)), *args[1:])
    if name == "type_as":
        args = (args[0].device, args[0].dtype)
    device, dtype, rest = _asked(tensor, args, kwargs)
    non_blocking = rest.pop("non_blocking", False)
    copy = rest.pop("copy", False)
    if device == tensor.device:
        return call(torch.Tensor.to, (tensor, dtype), {"copy": copy, **rest})
    if device.type == "cpu":
        return _to_host(call(torch.Tensor.to, (tensor, dtype), rest), non_blocking)
    if isinstance(tensor, GpuTensor):
        tensor = call(torch.Tensor.to, (tensor, dtype), rest)
        moved = new_on(device.index, tensor.inner)
        _between_devices(moved, tensor)
        return moved
    source = tensor
    if tensor.dtype != dtype:
        # A copy to a device that converts too: the host does that first, in pageable memory.
        source, non_blocking = tensor.to(dtype), False
    moved = new_on(device.index, source)
    return copy_(torch.Tensor.copy_, moved, source, non_blocking)


@special("cpu")
def cpu(func: Callable, tensor: GpuTensor, **kwargs: Any) -> torch.Tensor:
    """Tensor.cpu."""
    return _to_host(tensor, non_blocking=False)


@special("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__format__")
def number(func: Callable, tensor: GpuTensor, *args: Any) -> Any:
    """What needs the numbers on the host: it waits for them."""
    return func(_to_host(tensor, non_blocking=False), *args)


@special("numpy", "__array__")
def numpy(func: Callable, tensor: GpuTensor, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(
        f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the "
        "tensor to host memory first."
    )


@special("data_ptr")
def data_ptr(func: Callable, tensor: GpuTensor) -> int:
    return tensor.inner.data_ptr()


@special("is_pinned")
def is_pinned(func: Callable, tensor: GpuTensor, *args: Any) -> bool:
    return False


@special("pin_memory")
def pin_memory(func: Callable, tensor: GpuTensor, *args: Any) -> torch.Tensor:
    raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")


@special("get_device")
def get_device(func: Callable, tensor: GpuTensor) -> int:
    return tensor.index_


@special("__deepcopy__", "__reduce_ex__", "share_memory_")
def refused(func: Callable, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"the simulated GPU does not know {func.__name__}")


@special("__getitem__")
def getitem(func: Callable, tensor: torch.Tensor, key: Any) -> torch.Tensor:
    if not isinstance(tensor, GpuTensor):
        if isinstance(key, tuple) and all(_is_whole_number(it) for it in key):
            # Single numbers of a device come to the host first.
            return tensor[tuple(_to_host(it, non_blocking=False) for it in key)]
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    _indices_wait(key)
    return call(func, (tensor, key), {})


@special("__setitem__")
def setitem(func: Callable, tensor: torch.Tensor, key: Any, value: Any) -> None:
    if not isinstance(tensor, GpuTensor):
        # Of the host: the value comes there first.
        func(tensor, key, _to_host(value, non_blocking=False))
        return
    _indices_wait(key)
    if isinstance(value, torch.Tensor) and not isinstance(value, GpuTensor) and value.dim():
        part = call(torch.Tensor.__getitem__, (tensor, key), {})
        if part.inner.untyped_storage().data_ptr() != tensor.inner.untyped_storage().data_ptr():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but got value is on cpu, different "
                f"from other tensors on {tensor.device}"
            )
        copy_(torch.Tensor.copy_, part, value.expand(part.shape))
        return
    call(func, (tensor, key, value), {})


def new_on(index: int, like: torch.Tensor) -> GpuTensor:
    """An uninitialised tensor of a device, as dense as a copy of `like` would be."""
    with LOCK, Operations(machine(), index):
        return wrap(torch.empty_like(like), index)


def upload(source: torch.Tensor, index: int) -> GpuTensor:
    """What a factory that takes values of the host gives on a device."""
    target = new_on(index, source)
    with LOCK:
        return copy_(torch.Tensor.copy_, target, source)


def _asked(
    tensor: torch.Tensor, args: tuple, kwargs: dict
) -> tuple[torch.device, torch.dtype, dict]:
    """Device, dtype and the rest that a call of `.to` asks for."""
    rest = dict(kwargs)
    device, dtype = rest.pop("device", None), rest.pop("dtype", None)
    flags = []
    for value in args:
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif value is not None:
            device = value
    rest |= dict(zip(("non_blocking", "copy"), flags, strict=False))
    target = tensor.device if device is None else torch.device(device)
    if target.type == "cuda":
        target = torch.device("cuda", machine().index_of(target))
    return target, dtype or tensor.dtype, rest


def _to_host(value: Any, non_blocking: bool) -> Any:
    if not isinstance(value, GpuTensor):
        return value
    host = torch.empty_like(value.inner)
    # Such memory is pageable: the host waits for it, whatever it asked for.
    copy_(torch.Tensor.copy_, host, value, non_blocking=False)
    return host


def _indices_wait(key: Any) -> None:
    """Indices of the host are copied to the device, and the host waits for that."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(it, torch.Tensor) and not isinstance(it, GpuTensor) for it in keys):
        machine().refuse_capture("indices in host memory")


def _is_whole_number(index: Any) -> bool:
    return not isinstance(index, GpuTensor) or index.dim() == 0


def _between_devices(target: GpuTensor, source: GpuTensor) -> None:
    """By both devices' current streams, each of which waits for the other, as PyTorch does it."""
    here = machine()
    there, location = (here.current_stream(it.index_) for it in (target, source))
    there.wait_event(location.record_event())
    use_all(here, source.index_, "copy to a device", (source.inner,), {}, ())
    use_all(here, target.index_, "copy from a device", (target.inner,), {}, (0,))
    target.inner.copy_(source.inner)
    location.wait_event(there.record_event())


def _carry(
    on_device: GpuTensor,
    target: torch.Tensor,
    source: torch.Tensor,
    index: int,
    non_blocking: bool,
) -> None:
    """A copy over the link, on the current stream. target, source: both of CPU memory"""
    here = machine()
    stream = here.current_stream(index)
    inwards = on_device.inner is target
    host = source if inwards else target
    start, end = span_of(host)
    log = here.pinned.log(start, end - start) if end > start else None
    if non_blocking and end > start:
        if log is None:
            raise here.fault(
                RaceError(
                    f"a non_blocking copy of {end - start} bytes of host memory that is not "
                    "pinned, or not in one piece"
                )
            )
    elif here.capturing is not None:
        raise here.refusal("a copy of pageable memory")
    if target.dtype != source.dtype or target.shape != source.shape:
        source = source.to(target.dtype).expand(target.shape)
    what = "copy to the device" if inwards else "copy to the host"
    if not (inwards or non_blocking):
        here.host_waits(stream)
    memory = allocation(on_device.inner, index)
    stream.tick()
    if memory is not None:
        here.use(memory.log, on_device.inner, stream, writes=inwards, what=what)
    if log is not None:
        here.use(log, host, stream, writes=not inwards, what=what)
    if here.capturing is not None:
        here.capturing.add(lambda: target.copy_(source))
        return
    _enqueue(stream, target, source, end - start, what)
    if not non_blocking:
        stream.run()
        here.host_saw(stream.clock)


def _enqueue(
    stream: Stream, target: torch.Tensor, source: torch.Tensor, nbytes: int, what: str
) -> None:
    """Until the copy is made its target reads as NaN, and writing its source is noticed."""
    arriving = machine().arriving
    awaited = any(_overlap(each, source) for each in arriving)
    before = None if awaited else _checksum(source)
    if target.is_contiguous():
        target.view(-1).view(torch.uint8).fill_(_POISON)
    arriving.append(target)

    def run() -> None:
        arriving[:] = [each for each in arriving if each is not target]
        # What a copy ahead of this one brought to the source is no writing of the host's.
        if before is not None and _checksum(source) != before:
            raise machine().fault(
                RaceError(f"a {what} of {nbytes} bytes was asked for, and then its source written")
            )
        target.copy_(source)
        stream.carry(nbytes)

    stream.enqueue(run)


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    (start, end), (first, last) = span_of(one), span_of(two)
    return start < last and first < end


def _checksum(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    with torch.inference_mode():
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        return zlib.crc32(dense.view(-1).view(torch.uint8).numpy())
