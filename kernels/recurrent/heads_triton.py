"""Heads of rows as recurrences take them, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(left, right):
    """Multiply matrices of float32 without rounding them to TF32."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def scale_of(
    base, stride, row, real, KEY: tl.constexpr, NUMBERS: tl.constexpr, CORRECTS: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """Return what gives heads of rows length 1, [rows]; 1 where they stay as they are."""
    scale = tl.full([row.shape[0]], 1.0, dtype=tl.float32)
    if CORRECTS:
        squares = tl.zeros([row.shape[0]], dtype=tl.float32)
        for start in range(0, KEY, NUMBERS):
            number = start + tl.arange(0, NUMBERS)
            here = real[:, None] & (number < KEY)[None, :]
            part = tl.load(base + row[:, None] * stride + number[None, :], mask=here, other=0.0)
            part = part.to(tl.float32)
            squares += tl.sum(part * part, 1)
        scale = tl.rsqrt(squares + EPSILON)
    return scale


@triton.jit
def heads_of(base, stride, row, real, number, scale, KEY: tl.constexpr):
    """Load some numbers of heads of rows, normed and scaled, [rows, numbers] float32."""
    here = real[:, None] & (number < KEY)[None, :]
    part = tl.load(base + row[:, None] * stride + number[None, :], mask=here, other=0.0)
    return part.to(tl.float32) * scale[:, None]
