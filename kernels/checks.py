"""How launchers refuse: one sentence that reports every input."""

from __future__ import annotations

import torch


def require(kernel: str, fits: bool, **inputs: object) -> None:
    """Raises ValueError, naming every shape, stride, dtype and device, unless `fits`."""
    if not fits:
        report = ", ".join(f"{name} {_described(value)}" for name, value in inputs.items())
        raise ValueError(f"{kernel} cannot take {report}")


def alike(*tensors: torch.Tensor | None) -> bool:
    """Whether tensors, the first of which is there, share dtype and device, and rows of their last
    dimension are contiguous.
    """
    # A plain loop: this is asked for several times a layer.
    dtype, device = tensors[0].dtype, tensors[0].device
    for tensor in tensors:
        if tensor is not None and (
            tensor.dtype != dtype
            or tensor.device != device
            or (tensor.stride(-1) != 1 and tensor.shape[-1] != 1)
        ):
            return False
    return True


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} stride {value.stride()} {value.dtype} on {value.device}"
    return repr(value)
