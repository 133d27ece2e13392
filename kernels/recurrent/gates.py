"""Gates of linear attention: decays and rates of its rows, and the norm of what it gives."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triforce_kernels.checks import alike, require
from triforce_kernels.dispatch import implementation
from triforce_kernels.elementwise import sigmoid, silu, softplus
from triforce_kernels.layer import rms_norm


def delta_gates(
    decays: torch.Tensor, rates: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logarithms of decays, factor * softplus(decays + bias), and rates, sigmoid(rates),
    [rows, heads] float32 each. The sigmoid is rounded to the dtype of the rates first.

    decays, rates: [rows, heads]
    factor, bias: [heads] float32

    Raises ValueError for inputs that do not fit.
    """
    require(
        "delta_gates",
        alike(decays, rates)
        and alike(factor, bias)
        and factor.dtype == torch.float32
        and decays.shape == rates.shape
        and factor.shape == bias.shape == decays.shape[1:],
        decays=decays,
        rates=rates,
        factor=factor,
        bias=bias,
    )
    return implementation("delta_gates", decays.device)(decays, rates, factor, bias)


def gated_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the RMS norm of each head times SiLU of its gate, [rows, heads * size] in x's dtype.
    The norm is rounded before it is multiplied by its weights, and then by the gate in float32.

    x: [rows, heads, size], contiguous
    weight: [size]
    gate: [rows, heads * size]
    eps: what is added to the mean of squares

    Raises ValueError for inputs that do not fit.
    """
    rows, heads, size = x.shape
    require(
        "gated_norm",
        alike(x, weight, gate)
        and x.is_contiguous()
        and weight.shape == (size,)
        and gate.shape == (rows, heads * size),
        x=x,
        weight=weight,
        gate=gate,
    )
    return implementation("gated_norm", x.device)(x, weight, gate, eps)


def step_gates(
    steps: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logarithms of decays, factor * rates, and rates, softplus(steps + bias), [rows, heads]
    float32 each.

    steps: [rows, heads]
    factor, bias: [heads] float32

    Raises ValueError for inputs that do not fit.
    """
    require(
        "step_gates",
        alike(factor, bias)
        and factor.dtype == torch.float32
        and steps.device == factor.device
        and (steps.stride(-1) == 1 or steps.shape[-1] == 1)
        and factor.shape == bias.shape == steps.shape[1:],
        steps=steps,
        factor=factor,
        bias=bias,
    )
    return implementation("step_gates", steps.device)(steps, factor, bias)


class Skip(NamedTuple):
    """What is added to the output of a recurrence: values [rows, width] times the factor of their
    head, [heads], both float32.
    """

    values: torch.Tensor
    factor: torch.Tensor


def norm_of_gated(
    x: torch.Tensor,
    skip: Skip,
    weight: torch.Tensor,
    gate: torch.Tensor,
    eps: float,
    groups: int,
) -> torch.Tensor:
    """Return the RMS norm of each group of (x + skip) times SiLU of its gate, [rows, width] in the
    gate's dtype. The norm is in float32, and rounded before it is multiplied by its weights.

    x: [rows, width] float32, contiguous
    weight: [width]
    gate: [rows, width]
    eps: what is added to the mean of squares
    groups: number of groups of neighbouring columns

    Raises ValueError for inputs that do not fit.
    """
    rows, width = x.shape
    values, factor = skip
    require(
        "norm_of_gated",
        alike(weight, gate)
        and alike(x, values, factor)
        and x.dtype == torch.float32
        and x.device == gate.device
        and x.is_contiguous()
        and weight.shape == (width,)
        and gate.shape == values.shape == (rows, width)
        and width % groups == width % len(factor) == 0,
        x=x,
        values=values,
        factor=factor,
        weight=weight,
        gate=gate,
        groups=groups,
    )
    return implementation("norm_of_gated", x.device)(x, skip, weight, gate, eps, groups)


def gated(x: torch.Tensor, skip: Skip, gate: torch.Tensor) -> torch.Tensor:
    """Return (x + factor * values) * SiLU(gate), [rows, width] float32.

    x: [rows, width] float32. skip: values and factors, see `Skip`. gate: [rows, width]
    """
    heads = skip.values.unflatten(1, (len(skip.factor), -1))
    return (heads * skip.factor[:, None]).flatten(1).add_(x).mul_(silu(gate.float()))


def reference_gates(
    decays: torch.Tensor, rates: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return softplus(decays.float() + bias) * factor, sigmoid(rates).float()


def reference_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    normed = rms_norm(x, weight, eps)
    return (normed.flatten(1) * silu(gate.float())).to(x.dtype)


def reference_step_gates(
    steps: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rates = softplus(steps.float() + bias)
    return rates * factor, rates


def reference_norm_of_gated(
    x: torch.Tensor,
    skip: Skip,
    weight: torch.Tensor,
    gate: torch.Tensor,
    eps: float,
    groups: int,
) -> torch.Tensor:
    each = gated(x, skip, gate).unflatten(1, (groups, -1))
    normed = rms_norm(each, each.new_ones(each.shape[-1]), eps)
    return normed.flatten(1).to(gate.dtype) * weight
