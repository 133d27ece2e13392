"""Computation of the MLPs, with one function for each kind of MLP in `layers`."""

from __future__ import annotations

import torch

from triforce_kernels.layer import rms_norm, swiglu
from triforce_kernels.weights.linear import linear
from triforce_offload.weights.layouts import Views


def dense_mlp(w: Views, hidden: torch.Tensor, norm_eps: float, mixed: torch.Tensor) -> torch.Tensor:
    """Return SwiGLU's output [rows, hidden]; if ranks share the model, this rank's summand.

    hidden: hidden states before their norm, if the layer has one, [rows, hidden]
    mixed: what the mixer adds, [rows, hidden], which is first added to `hidden` in place
    """
    if "post_norm" in w:
        normed = rms_norm(hidden, w["post_norm"], norm_eps, mixed)
    else:
        normed = hidden.add_(mixed)
    return linear(swiglu(linear(normed, w["gate_up"])), w["down"])
