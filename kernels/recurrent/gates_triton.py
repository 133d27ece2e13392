"""`gates` on a GPU: one program for each row, or for each head of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import next_power_of_2


@triton.jit
def _gates_kernel(
    decays, rates, factor, bias, out_decays, out_rates, d_row, r_row, heads, WIDTH: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    real = head < heads
    decay = tl.load(decays + row * d_row + head, mask=real, other=0.0).to(tl.float32)
    decay += tl.load(bias + head, mask=real, other=0.0)
    # As in PyTorch, softplus is the identity above 20.
    soft = tl.where(decay > 20.0, decay, tl.log(1.0 + tl.exp(tl.minimum(decay, 20.0))))
    soft = tl.where(decay < -10.0, tl.exp(tl.minimum(decay, 20.0)), soft)
    each = tl.load(factor + head, mask=real, other=0.0)
    rate = tl.load(rates + row * r_row + head, mask=real, other=0.0)
    rounded = tl.sigmoid(rate.to(tl.float32)).to(rate.dtype).to(tl.float32)
    tl.store(out_decays + row * heads + head, soft * each, mask=real)
    tl.store(out_rates + row * heads + head, rounded, mask=real)


def gates(
    decays: torch.Tensor, rates: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = decays.shape
    out = factor.new_empty(2, rows, heads)
    _gates_kernel[(rows,)](
        decays, rates, factor, bias, *out, decays.stride(0), rates.stride(0), heads,
        WIDTH=next_power_of_2(heads), num_warps=1,
    )  # fmt: skip
    return out[0], out[1]


@triton.jit
def _norm_kernel(x, weight, gate, out, g_row, heads, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    number = tl.arange(0, WIDTH)
    real = number < SIZE
    place = (row * heads + head) * SIZE + number
    each = tl.load(x + place, mask=real, other=0.0)
    exact = each.to(tl.float32)
    exact *= tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)
    factor = tl.load(weight + number, mask=real, other=0.0)
    normed = (exact.to(each.dtype) * factor).to(tl.float32)
    opened = tl.load(gate + row * g_row + head * SIZE + number, mask=real, other=0.0)
    opened = opened.to(tl.float32)
    tl.store(out + place, normed * opened * tl.sigmoid(opened), mask=real)


def norm(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    rows, heads, size = x.shape
    out = x.new_empty(rows, heads * size)
    _norm_kernel[(rows, heads)](
        x, weight, gate, out, gate.stride(0), heads, eps, SIZE=size,
        WIDTH=next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    x, weight, gate, out, g_row, groups, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    number = tl.arange(0, WIDTH)
    real, column = number < SIZE, group * SIZE + number
    place = row * (groups * SIZE) + column
    opened = tl.load(gate + row * g_row + column, mask=real, other=0.0)
    exact = opened.to(tl.float32)
    exact *= tl.sigmoid(exact) * tl.load(x + place, mask=real, other=0.0)
    exact *= tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)
    factor = tl.load(weight + column, mask=real, other=0.0)
    tl.store(out + place, exact.to(opened.dtype) * factor, mask=real)


def norm_of_gated(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, groups: int
) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    size = width // groups
    _gated_kernel[(rows, groups)](
        x, weight, gate, out, gate.stride(0), groups, eps, SIZE=size,
        WIDTH=next_power_of_2(size), num_warps=1 if size <= 512 else 8,
    )  # fmt: skip
    return out
