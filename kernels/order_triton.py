"""Floats as integers of the same order, in which thresholds are found bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """Return float32 as int32 of the same order; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
