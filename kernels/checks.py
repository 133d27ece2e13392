"""Input checks of launchers: one sentence that reports every input."""

from __future__ import annotations

import torch


def require(kernel: str, fits: bool, **inputs: object) -> None:
    """Raise ValueError with every shape, stride, dtype and device, unless `fits`."""
    if not fits:
        report = ", ".join(f"{name} {_described(value)}" for name, value in inputs.items())
        raise ValueError(f"{kernel} cannot take {report}")


def alike(*tensors: torch.Tensor | None) -> bool:
    """Return whether all given tensors share dtype and device and have a contiguous last dimension.
    The first must not be None.
    """
    # A plain loop: this is called several times a layer.
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
