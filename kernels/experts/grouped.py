"""Gated MLPs of experts: each chosen expert of a forward once, over the rows that chose it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from triforce_kernels.checks import require
from triforce_kernels.weights.linear import Weight, linear, rows_of


def gated_experts(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    count: int,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gated: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sums of the experts of each row, [rows, hidden] in x's dtype. They are
    summed in float32, in the order of the experts.

    x: [rows, hidden]
    gate_up, down: [count * 2 width, hidden] and [count * hidden, width], expert after expert
    chosen, weights: experts of each row and their weights, [rows, active] int64 and float32
    gated: the activation, [rows, 2 width] to [rows, width]
    Waits for the device. Raises ValueError.
    """
    rows, hidden = x.shape
    require(
        "gated_experts",
        chosen.shape == weights.shape
        and chosen.shape[0] == rows
        and gate_up.shape[0] == 2 * count * down.shape[1]
        and down.shape[0] == count * hidden
        and gate_up.shape[1] == hidden,
        x=x,
        chosen=chosen,
        weights=weights,
    )
    out = x.new_zeros(rows, hidden, dtype=torch.float32)
    width = 2 * down.shape[1]
    for expert in chosen.unique().tolist():
        row, place = (chosen == expert).nonzero(as_tuple=True)
        part = rows_of(gate_up, expert * width, (expert + 1) * width)
        inner = gated(linear(x[row], part))
        part = rows_of(down, expert * hidden, (expert + 1) * hidden)
        out.index_add_(0, row, linear(inner, part).float() * weights[row, place, None])
    return out.to(x.dtype)
