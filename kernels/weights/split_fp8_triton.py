"""`split_fp8` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.weights.block_types import F8_E4M3, F8_HIGH
from triforce_kernels.weights.split_fp8 import SCALED_BASE, SplitFP8Weight

# Blocks of a row that a program joins at a time.
_BLOCKS = 8


@triton.jit
def _join_kernel(
    high, bases, low, starts, out, blocks,
    HIGH_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCKS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Join one row. Blocks of 128 numbers: the scale, 16 bytes of signs, and 64 of codes."""
    row = tl.program_id(0).to(tl.int64)
    bits = low + tl.load(starts + row)
    high += row * blocks * HIGH_BYTES
    out += row * blocks * BLOCK_BYTES
    number = tl.arange(0, BLOCKS * 128)
    each, within = number // 128, number % 128
    begun = 0
    for first in range(0, blocks, BLOCKS):
        block = first + each
        real = block < blocks
        base = tl.load(bases + row * blocks + block, mask=real, other=0).to(tl.int32)
        place = high + block * HIGH_BYTES
        at = place + 20 + within // 64 * 32 + within % 32
        both = tl.load(at, mask=real, other=255).to(tl.int32)
        code = (both >> (within // 32 % 2 * 4)) & 15
        length = tl.where(code >= 4, 1, tl.where(code >= 2, 2, tl.where(code == 1, 3, 7)))
        length = tl.where(real, length, 0)
        end = begun + tl.cumsum(length, 0)
        begin = end - length
        begun += tl.sum(length, 0)
        # The second byte is read only if some of the bits are there.
        here = tl.load(bits + begin // 8, mask=real, other=0).to(tl.int32)
        beyond = real & (begin % 8 + length > 8)
        here |= tl.load(bits + begin // 8 + 1, mask=beyond, other=0).to(tl.int32) << 8
        value = (here >> (begin % 8)) & ((1 << length) - 1)
        large = ((base - 3 + (code >> 2)) << 3) | ((code & 3) << 1) | value
        middle = ((base - 3) << 3) | ((code & 1) << 2) | value
        small = tl.where(code == 1, ((base - 4) << 3) | value, value)
        magnitude = tl.where(code >= 4, large, tl.where(code >= 2, middle, small))
        sign = tl.load(place + 4 + within // 8, mask=real, other=0).to(tl.int32)
        joined = (((sign >> (within % 8)) & 1) << 7) | magnitude
        tl.store(out + block * BLOCK_BYTES + within, joined.to(tl.uint8), mask=real)
        block = first + tl.arange(0, BLOCKS)
        real = block < blocks
        base = tl.load(bases + row * blocks + block, mask=real, other=SCALED).to(tl.int32)
        single: tl.constexpr = tl.pointer_type(tl.float32)
        scale = tl.load((high + block * HIGH_BYTES).to(single), mask=real, other=0.0)
        power = ((127 + SCALED - base) << 23).to(tl.float32, bitcast=True)
        tl.store((out + block * BLOCK_BYTES + 128).to(single), scale * power, mask=real)


def join(weight: SplitFP8Weight) -> torch.Tensor:
    """`split_fp8.join`."""
    rows, blocks = weight.bases.shape
    out = torch.empty(rows, blocks * F8_E4M3.nbytes, dtype=torch.uint8, device=weight.device)
    if rows:
        _join_kernel[(rows,)](
            weight.data, weight.bases, weight.low, weight.starts, out, blocks,
            HIGH_BYTES=F8_HIGH.nbytes, BLOCK_BYTES=F8_E4M3.nbytes, BLOCKS=_BLOCKS,
            SCALED=SCALED_BASE, num_warps=4,
        )  # fmt: skip
    return out
