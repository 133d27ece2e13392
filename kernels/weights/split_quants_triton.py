"""`split_quants` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv
from triforce_kernels.weights.block_types import HIGH_QUANTS, BlockType
from triforce_kernels.weights.split_quants import LOW_BYTES

# Blocks that a program joins, and places of a block that it reads at a time.
_BLOCKS, _PLACES = 16, 32
# Where scales are in a block, in one of high bits, and how many bytes they have.
_SCALES = {"Q6_K": (192, 128, 18), "Q5_K": (0, 0, 16)}


@triton.jit
def _join_kernel(
    data, low, out, count,
    KIND: tl.constexpr, HIGH_BYTES: tl.constexpr, LOW_BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
    TO: tl.constexpr, FROM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Join some blocks. PLACES: bytes of high bits that are read at a time

    TO, FROM, SCALES: place of the scales in a block and in one of high bits, and their bytes
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    real = (block < count)[:, None]
    place = tl.arange(0, PLACES)[None, :]
    high = data + block[:, None] * HIGH_BYTES
    fine = low + block[:, None] * LOW_BYTES + place
    into = out + block[:, None] * BLOCK_BYTES
    scales = real & (place < SCALES)
    tl.store(into + TO + place, tl.load(high + FROM + place, mask=scales), mask=scales)
    if KIND == "Q6_K":
        for half in tl.static_range(2):
            bits = tl.load(fine + half * 32, mask=real)
            upper = tl.zeros([BLOCKS, PLACES], tl.uint8)
            for quarter in tl.static_range(2):
                at = half * 64 + quarter * 32 + place
                here = tl.load(high + at, mask=real)
                first, second = here & 15, here >> 4
                four = ((first & 3) << 2) | ((bits >> (2 * quarter)) & 3)
                four |= ((second & 3) << 6) | (((bits >> (2 * quarter + 4)) & 3) << 4)
                tl.store(into + at, four, mask=real)
                upper |= (first >> 2) << (2 * quarter)
                upper |= (second >> 2) << (2 * quarter + 4)
            tl.store(into + 128 + half * 32 + place, upper, mask=real)
    else:
        bits = tl.load(fine, mask=real)
        fifth = tl.zeros([BLOCKS, PLACES], tl.uint8)
        for pair in tl.static_range(4):
            here = tl.load(high + 16 + pair * 32 + place, mask=real)
            first, second = here & 15, here >> 4
            four = ((first & 7) << 1) | ((bits >> (2 * pair)) & 1)
            four |= ((second & 7) << 5) | (((bits >> (2 * pair + 1)) & 1) << 4)
            tl.store(into + 48 + pair * 32 + place, four, mask=real)
            fifth |= ((first >> 3) << (2 * pair)) | ((second >> 3) << (2 * pair + 1))
        tl.store(into + 16 + place, fifth, mask=real)


def join(data: torch.Tensor, low: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """`split_quants.SplitQuantsWeight.join`."""
    high, name = HIGH_QUANTS[kind.name], kind.name
    of_row = data.shape[1] // high.nbytes
    out, count = data.new_empty(len(data), of_row * kind.nbytes), len(data) * of_row
    to, begin, scales = _SCALES[name]
    if count:
        _join_kernel[(cdiv(count, _BLOCKS),)](
            data, low, out, count,
            KIND=name, HIGH_BYTES=high.nbytes, LOW_BYTES=LOW_BYTES[name],
            BLOCK_BYTES=kind.nbytes, BLOCKS=_BLOCKS, PLACES=_PLACES,
            TO=to, FROM=begin, SCALES=scales, num_warps=4,
        )  # fmt: skip
    return out
