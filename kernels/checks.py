"""How launchers refuse: one sentence that reports every input."""

from __future__ import annotations

import torch


def require(kernel: str, fits: bool, **inputs: object) -> None:
    """Raises ValueError, naming every shape, stride, dtype and device, unless `fits`."""
    if not fits:
        report = ", ".join(f"{name} {_described(value)}" for name, value in inputs.items())
        raise ValueError(f"{kernel} cannot take {report}")


def alike(*tensors: torch.Tensor | None) -> bool:
    """Whether tensors share dtype and device, and rows of their last dimension are contiguous."""
    there = [tensor for tensor in tensors if tensor is not None]
    return all(
        tensor.dtype == there[0].dtype
        and tensor.device == there[0].device
        and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
        for tensor in there
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} stride {value.stride()} {value.dtype} on {value.device}"
    return repr(value)
