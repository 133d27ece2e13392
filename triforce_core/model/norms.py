"""Computation of norms, of which a model has one kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triforce_core.model.layers import NormKind
from triforce_kernels.host.layer import NormKind as HostNorm
from triforce_kernels.layer import layer_norm, rms_norm

# What is added to the weights of norms whose product with them is in float32.
_OFFSETS = {NormKind.RMS_PLUS_ONE: 1.0, NormKind.RMS_FLOAT32: 0.0}


@dataclass(frozen=True)
class Norm:
    """The norm of a model. eps: what is added to the mean of squares"""

    kind: NormKind
    eps: float

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the norm over the last dimension of x, after adding `delta` to x in place, if
        given. See `rms_norm` for shapes.
        """
        if self.kind is NormKind.LAYER:
            return layer_norm(x, weight, self.eps, delta)
        return rms_norm(x, weight, self.eps, delta, offset=_OFFSETS.get(self.kind))

    @property
    def on_host(self) -> tuple[HostNorm, float]:
        """What the processor's kernels compute: the kind of the norm, and the offset of weights."""
        if self.kind is NormKind.LAYER:
            return HostNorm.LAYER, 0.0
        offset = _OFFSETS.get(self.kind)
        return (HostNorm.RMS, 0.0) if offset is None else (HostNorm.RMS_FLOAT32, offset)

    def scaled(self, x: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return an RMS norm of x [rows, width], a part of wider rows.

        mean: mean of the squares of whole rows, [rows, 1] float32
        weight: [width]
        """
        exact, offset = x.float() * torch.rsqrt(mean + self.eps), _OFFSETS.get(self.kind)
        if offset is None:
            return exact.to(x.dtype) * weight
        return exact.mul_(weight.float() + offset).to(x.dtype)
