"""`gather` on a GPU: one program for a KV head of a layer and a few slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gather import ChunkSource

_SLOTS = 4
"""Of a program: their chunks are on their way at once, to hide what a read of host memory takes."""


@triton.jit(do_not_specialize=["slots", "blocks", "per_block", "tail_tokens"])
def _gather_kernel(
    moves, addresses, target, t_layer, t_half, t_head,
    kv_heads, slots, blocks, per_block, block_tokens, tail_tokens,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
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
        # A chunk of one head is contiguous: [CHUNK, DIM].
        inside = tl.arange(0, WIDTH)
        here = moved[:, None] & (inside < CHUNK * DIM)[None, :]
        item = target.dtype.element_ty
        source = base.to(tl.pointer_type(item))[:, None]
        source += ((head * tokens + start) * DIM)[:, None] + inside[None, :]
        place = target + layer * t_layer + head * t_head
        place += slot.to(tl.int64)[:, None] * (CHUNK * DIM) + inside[None, :]
        keys = tl.load(source, mask=here)
        values = tl.load(source + (kv_heads * tokens * DIM)[:, None], mask=here)
        tl.store(place, keys, mask=here)
        tl.store(place + t_half, values, mask=here)


def gather(moves: torch.Tensor, source: ChunkSource, target: torch.Tensor) -> None:
    layers, _, kv_heads, slots, chunk, head_dim = target.shape
    _gather_kernel[(layers, kv_heads, triton.cdiv(slots, _SLOTS))](
        moves, source.addresses, target, *target.stride()[:3],
        kv_heads, slots, source.addresses.shape[1] - 1, source.block_tokens // chunk,
        source.block_tokens, source.tail_tokens,
        CHUNK=chunk, DIM=head_dim, WIDTH=triton.next_power_of_2(chunk * head_dim), SLOTS=_SLOTS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
