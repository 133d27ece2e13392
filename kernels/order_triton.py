"""Floats as whole numbers of the same order: thresholds are found in them bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """float32 as int32 of the same order; of two zeros, one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
