"""NCCL, by gloo on the memory beneath the devices' tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.cuda import nccl

from simulated_gpu.machine import machine
from simulated_gpu.operators import use_all
from simulated_gpu.tensor import GpuTensor


@contextmanager
def collected() -> Iterator[None]:
    """Inside, torch.distributed takes tensors of simulated devices, and knows a backend `nccl`."""
    with ExitStack() as stack:
        start = dist.init_process_group

        def init(backend: str, *args: Any, device_id: object = None, **kwargs: Any) -> None:
            start("gloo" if backend == "nccl" else backend, *args, **kwargs)

        stack.enter_context(patch.object(dist, "init_process_group", init))
        for name in ("all_reduce", "broadcast", "gather"):
            on_devices = _on_devices(name, getattr(dist, name))
            stack.enter_context(patch.object(dist, name, on_devices))
        stack.enter_context(patch.object(nccl, "all_reduce", _sum_of_devices))
        yield


def _sum_of_devices(inputs: Sequence[GpuTensor]) -> None:
    """torch.cuda.nccl.all_reduce: tensors of several devices of one process, in place."""
    for tensor in inputs:
        use_all(machine(), tensor.index_, "all_reduce", (tensor.inner,), {}, (0,))
    whole = sum(tensor.inner for tensor in inputs)
    for tensor in inputs:
        tensor.inner.copy_(whole)


def _on_devices(name: str, original: Callable) -> Callable:
    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, GpuTensor):
            return original(tensor, *args, **kwargs)
        here, index = machine(), tensor.index_
        inner = [_inner(value) for value in (tensor, *args)]

        def once() -> None:
            use_all(machine(), index, name, tuple(inner), {}, tuple(range(len(inner))))
            original(*inner, **kwargs)

        if here.capturing is not None:
            here.capturing.reads(inner, index)
            here.capturing.add(once)
        else:
            once()
        return None

    return run


def _inner(value: Any) -> Any:
    if isinstance(value, list):
        return [_inner(each) for each in value]
    return value.inner if isinstance(value, GpuTensor) else value
