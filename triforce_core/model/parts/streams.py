"""Computation of residual streams."""

from __future__ import annotations

import torch

from triforce_core.model.norms import Norm
from triforce_kernels.streams.streams import mean_of_gated, silu_of_mean
from triforce_kernels.weights.linear import Weight, linear
from triforce_offload.weights.layouts import Views


def normed_streams(norm: Norm, x: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    """Return the norm of each of `count` vectors of a row, [rows, count * width].

    x: [rows, count * width]
    weight: of the norm of each vector, [count * width]
    """
    return norm(x.unflatten(1, (count, -1)), weight.view(count, -1)).flatten(1)


def gated_mean(normed: torch.Tensor, down: Weight, up: Weight, count: int) -> torch.Tensor:
    """Return the mean over streams of normed hidden states times their gates, [rows, width].

    normed: [rows, count * width]
    """
    return mean_of_gated(linear(silu_of_mean(linear(normed, down), count), up), normed, count)


class Around:
    """What is around a mixer or an MLP with residual streams."""

    def __init__(self, part: str, norm: Norm, count: int) -> None:
        """part: with what the names of tensors begin. count: number of streams"""
        self._part = part
        self._norm = norm
        self._count = count

    def before(self, w: Views, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the mixer or the MLP takes, [rows, width], and the sums that weigh its output
        in each stream, [rows, count].

        hidden: [rows, count * width]
        """
        part, count = self._part, self._count
        normed = normed_streams(self._norm, hidden, w[f"{part}_mix_norm"], count)
        mean = gated_mean(normed, w[f"{part}_mix_down"], w[f"{part}_mix_up"], count)
        return mean, linear(normed, w[f"{part}_inject"])
