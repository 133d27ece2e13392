"""What a layer computes of each token by itself: a function for each kind of `layers` MLP."""

from __future__ import annotations

import torch

from triforce_kernels.layer import rms_norm, swiglu
from triforce_kernels.weights.linear import linear
from triforce_offload.weights.layouts import Views


def dense_mlp(w: Views, hidden: torch.Tensor, norm_eps: float, mixed: torch.Tensor) -> torch.Tensor:
    """SwiGLU: from hidden states [rows, hidden], before their norm, to the MLP's output [rows,
    hidden]; where ranks share the model, this one's part of the sum.

    mixed: the mixer's output [rows, hidden], which is added to `hidden` first, in place
    """
    gate_up = linear(rms_norm(hidden, w["post_norm"], norm_eps, mixed), w["gate_up"])
    return linear(swiglu(gate_up), w["down"])
