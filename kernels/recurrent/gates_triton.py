"""`gates` on a GPU: one program for each row, or for each head of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import next_power_of_2
from triforce_kernels.recurrent.gates import Skip


@triton.jit
def _softplus(x):
    # As in PyTorch, it is the identity above 20. log(1 + e) loses digits of a small e; times
    # e / ((1 + e) - 1) it does not (Goldberg, 1991, theorem 4).
    e = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + e
    exact = tl.where(one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _gates_kernel(
    decays, rates, factor, bias, out_decays, out_rates, d_row, r_row, heads, WIDTH: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    real = head < heads
    decay = tl.load(decays + row * d_row + head, mask=real, other=0.0).to(tl.float32)
    soft = _softplus(decay + tl.load(bias + head, mask=real, other=0.0))
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
def _steps_kernel(steps, factor, bias, out_decays, out_rates, s_row, heads, WIDTH: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    real = head < heads
    step = tl.load(steps + row * s_row + head, mask=real, other=0.0).to(tl.float32)
    rate = _softplus(step + tl.load(bias + head, mask=real, other=0.0))
    each = tl.load(factor + head, mask=real, other=0.0)
    tl.store(out_decays + row * heads + head, rate * each, mask=real)
    tl.store(out_rates + row * heads + head, rate, mask=real)


def step_gates(
    steps: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = steps.shape
    out = factor.new_empty(2, rows, heads)
    _steps_kernel[(rows,)](
        steps, factor, bias, *out, steps.stride(0), heads,
        WIDTH=next_power_of_2(heads), num_warps=1,
    )  # fmt: skip
    return out[0], out[1]


@triton.jit
def _gated_kernel(
    x, values, skip, weight, gate, out, v_row, g_row, groups, of_head, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    number = tl.arange(0, WIDTH)
    real, column = number < SIZE, group * SIZE + number
    place = row * (groups * SIZE) + column
    exact = tl.load(values + row * v_row + column, mask=real, other=0.0)
    exact *= tl.load(skip + column // of_head, mask=real, other=0.0)
    exact += tl.load(x + place, mask=real, other=0.0)
    opened = tl.load(gate + row * g_row + column, mask=real, other=0.0)
    wide = opened.to(tl.float32)
    exact *= wide * tl.sigmoid(wide)
    exact *= tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)
    factor = tl.load(weight + column, mask=real, other=0.0)
    tl.store(out + place, exact.to(opened.dtype) * factor, mask=real)


def norm_of_gated(
    x: torch.Tensor,
    skip: Skip,
    weight: torch.Tensor,
    gate: torch.Tensor,
    eps: float,
    groups: int,
) -> torch.Tensor:
    (rows, width), (values, factor) = x.shape, skip
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    size = width // groups
    _gated_kernel[(rows, groups)](
        x, values, factor, weight, gate, out, values.stride(0), gate.stride(0), groups,
        width // len(factor), eps, SIZE=size, WIDTH=next_power_of_2(size),
        num_warps=1 if size <= 512 else 8,
    )  # fmt: skip
    return out
