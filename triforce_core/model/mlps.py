"""Computation of the MLPs, with one class for each kind of MLP in `layers`."""

from __future__ import annotations

import torch

from triforce_core.model.layers import Activation, DenseMLP
from triforce_core.model.norms import Norm
from triforce_kernels.layer import geglu, swiglu
from triforce_kernels.weights.linear import linear
from triforce_offload.weights.layouts import Views

_GATED = {Activation.SILU: swiglu, Activation.GELU_TANH: geglu}


class GatedMLP:
    """A gated MLP over every token."""

    def __init__(self, spec: DenseMLP, norm: Norm, *, parallel: bool) -> None:
        """parallel: as in LayerSpec"""
        self._gated = _GATED[spec.activation]
        self._parallel = parallel
        self._norm = norm

    def __call__(self, w: Views, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output [rows, hidden]; if ranks share the model, this rank's summand.

        hidden: hidden states before their norm, if the layer has one, [rows, hidden]
        mixed: what the mixer adds, [rows, hidden], which is first added to `hidden` in place
        """
        if self._parallel:
            normed = self._norm(hidden, w["input_norm"])
            hidden += mixed
        elif "post_norm" in w:
            normed = self._norm(hidden, w["post_norm"], mixed)
        else:
            normed = hidden.add_(mixed)
        return linear(self._gated(linear(normed, w["gate_up"])), w["down"])
