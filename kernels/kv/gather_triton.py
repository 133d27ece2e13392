"""`gather` on a GPU: one program for each KV head of a layer and a few slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.kv.gather import ChunkSource

# Elements of keys, and as many of values, that a program reads at once, to hide the latency of host
# memory.
_AT_ONCE = 4096
_ALIGNED = 16


@triton.jit(do_not_specialize=["slots", "blocks", "per_block", "tail_tokens"])
def _gather_kernel(
    moves, addresses, target, t_layer, t_half, t_head,
    kv_heads, slots, blocks, per_block, block_tokens, tail_tokens,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    ALIGNED: tl.constexpr, SIDES: tl.constexpr,
):  # fmt: skip
    layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.program_id(2) * SLOTS + tl.arange(0, SLOTS)
    chunk = tl.load(moves + (layer * kv_heads + head) * slots + slot, mask=slot < slots, other=-1)
    moved = chunk >= 0
    if tl.max(moved.to(tl.int32)) > 0:
        block = tl.minimum(tl.maximum(chunk, 0) // per_block, blocks)
        base = tl.load(addresses + layer * (blocks + 1) + block, mask=moved, other=0)
        tokens = tl.where(block == blocks, tail_tokens, block_tokens).to(tl.int64)
        start = (chunk - block * per_block) * CHUNK
        item = target.dtype.element_ty
        keys_at = base.to(tl.pointer_type(item)) + (head * tokens + start) * DIM
        values_at = keys_at + kv_heads * tokens * DIM
        place = target + layer * t_layer + head * t_head + slot.to(tl.int64) * (CHUNK * DIM)
        # A chunk of one head is contiguous: [CHUNK, DIM].
        for first in range(0, CHUNK * DIM, WIDTH):
            inside = first + tl.arange(0, WIDTH)
            here = moved[:, None] & (inside < CHUNK * DIM)[None, :]
            keys = keys_at[:, None] + inside[None, :]
            if ALIGNED > 1:
                # Addresses from a table: the compiler cannot infer that 16 bytes can be read at
                # once.
                keys = tl.multiple_of(keys, (1, ALIGNED))
            there = place[:, None] + inside[None, :]
            brought = tl.load(keys, mask=here)
            if SIDES > 1:
                values = values_at[:, None] + inside[None, :]
                if ALIGNED > 1:
                    values = tl.multiple_of(values, (1, ALIGNED))
                tl.store(there + t_half, tl.load(values, mask=here), mask=here)
            tl.store(there, brought, mask=here)


def gather(moves: torch.Tensor, source: ChunkSource, target: torch.Tensor) -> None:
    layers, sides, kv_heads, slots, chunk, head_dim = target.shape
    width = min(next_power_of_2(chunk * head_dim), _AT_ONCE)
    count = max(1, min(4, _AT_ONCE // width))
    # Blocks and tails begin at multiples of 64 bytes, and so do heads and chunks if rows do.
    rows_aligned = head_dim * target.itemsize % _ALIGNED == 0
    _gather_kernel[(layers, kv_heads, cdiv(slots, count))](
        moves, source.addresses, target, *target.stride()[:3],
        kv_heads, slots, source.addresses.shape[1] - 1, source.block_tokens // chunk,
        source.block_tokens, source.tail_tokens,
        CHUNK=chunk, DIM=head_dim, WIDTH=width, SLOTS=count,
        ALIGNED=_ALIGNED if rows_aligned else 1, SIDES=sides, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
