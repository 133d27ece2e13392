"""Computation of residual streams."""

from __future__ import annotations

import torch

from triforce_core.model.norms import Norm
from triforce_kernels.elementwise import sigmoid, silu
from triforce_kernels.weights.linear import Weight, linear
from triforce_offload.weights.layouts import Views


def normed_streams(norm: Norm, x: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    """Return the norm of each of `count` vectors of a row, [rows, count * width].

    x: [rows, count * width]
    weight: of the norm of each vector, [count * width]
    """
    streams, weights = x.unflatten(1, (count, -1)), weight.view(count, -1)
    return torch.cat([norm(streams[:, i].contiguous(), weights[i]) for i in range(count)], 1)


def gated_mean(normed: torch.Tensor, down: Weight, up: Weight, count: int) -> torch.Tensor:
    """Return the mean over streams of normed hidden states times their gates, [rows, width].

    normed: [rows, count * width]
    """
    narrow = silu(linear(normed, down).div_(count))
    gated = sigmoid(linear(narrow, up)).mul_(normed).unflatten(1, (count, -1))
    total = gated[:, 0].float()
    for stream in range(1, count):
        total += gated[:, stream]
    return total.div_(count).to(normed.dtype)


class Around:
    """What is around a mixer or an MLP with residual streams."""

    def __init__(self, part: str, norm: Norm, count: int) -> None:
        """part: with what the names of tensors begin. count: number of streams"""
        self._part = part
        self._norm = norm
        self._count = count

    def before(self, w: Views, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the mixer or the MLP takes, [rows, width], and the weights with which its
        output is added to the streams, [rows, count].

        hidden: [rows, count * width]
        """
        part, count = self._part, self._count
        normed = normed_streams(self._norm, hidden, w[f"{part}_mix_norm"], count)
        mean = gated_mean(normed, w[f"{part}_mix_down"], w[f"{part}_mix_up"], count)
        weights = sigmoid(linear(normed, w[f"{part}_inject"]).div_(count)).mul_(2)
        return mean, weights

    def after(self, hidden: torch.Tensor, weights: torch.Tensor, output: torch.Tensor) -> None:
        """Add the output of the mixer or the MLP, [rows, width], to all streams, in place."""
        hidden += (output.unsqueeze(1) * weights.unsqueeze(2)).flatten(1)
