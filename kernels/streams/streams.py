"""What is computed around a mixer or an MLP with residual streams, in three launches.

A row has `count` hidden states, side by side: its streams (Qwen3.8-Flash-Next).
"""

from __future__ import annotations

import torch

from triforce_kernels.checks import alike, require
from triforce_kernels.dispatch import implementation
from triforce_kernels.elementwise import sigmoid, silu


def silu_of_mean(sums: torch.Tensor, count: int) -> torch.Tensor:
    """Return SiLU of sums over streams divided by their number, in the shape of `sums`.

    sums: [rows, width], contiguous

    Raises ValueError for inputs that do not fit.
    """
    require("silu_of_mean", sums.dim() == 2 and sums.is_contiguous(), sums=sums, count=count)
    return implementation("silu_of_mean", sums.device)(sums, count)


def mean_of_gated(gates: torch.Tensor, normed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mean over streams of sigmoid(gates) * normed, [rows, width].

    gates, normed: [rows, count * width], contiguous

    Raises ValueError for inputs that do not fit.
    """
    require(
        "mean_of_gated",
        alike(gates, normed)
        and gates.shape == normed.shape
        and gates.dim() == 2
        and gates.shape[1] % count == 0
        and gates.is_contiguous()
        and normed.is_contiguous(),
        gates=gates,
        normed=normed,
        count=count,
    )
    return implementation("mean_of_gated", gates.device)(gates, normed, count)


def add_to_streams(streams: torch.Tensor, sums: torch.Tensor, output: torch.Tensor) -> None:
    """Add 2 * sigmoid(sums / count) * output to each stream, in place.

    streams: [rows, count * width], contiguous
    sums: of each stream, [rows, count], contiguous
    output: [rows, width], contiguous

    Raises ValueError for inputs that do not fit, before any write.
    """
    rows, count = sums.shape
    require(
        "add_to_streams",
        alike(streams, sums, output)
        and streams.shape == (rows, count * output.shape[1])
        and output.shape[0] == rows
        and all(x.is_contiguous() for x in (streams, sums, output)),
        streams=streams,
        sums=sums,
        output=output,
    )
    implementation("add_to_streams", streams.device)(streams, sums, output)


def reference_silu_of_mean(sums: torch.Tensor, count: int) -> torch.Tensor:
    return silu(sums / count)


def reference_mean_of_gated(gates: torch.Tensor, normed: torch.Tensor, count: int) -> torch.Tensor:
    gated = sigmoid(gates).mul_(normed).unflatten(1, (count, -1))
    total = gated[:, 0].float()
    for stream in range(1, count):
        total += gated[:, stream]
    return total.div_(count).to(normed.dtype)


def reference_add_to_streams(
    streams: torch.Tensor, sums: torch.Tensor, output: torch.Tensor
) -> None:
    weights = sigmoid(sums / sums.shape[1]).mul_(2)
    streams += (output.unsqueeze(1) * weights.unsqueeze(2)).flatten(1)
