"""`gather_split` on a GPU: one program for each slot of a KV head of a layer."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import next_power_of_2
from triforce_kernels.kv.gather_split import SplitChunkSource
from triforce_kernels.weights.split_bf16_triton import floor_of, number_bits

# Tokens that a program reads at once.
_TOKENS = 16
# Blocks, their parts and tails begin at multiples of this many bytes, and a thread reads this many
# at once if heads are aligned to them too.
_ALIGNED = 16


@triton.jit(do_not_specialize=["slots", "blocks", "per_block", "tail_tokens"])
def _gather_split_kernel(
    moves, addresses, target, t_layer, t_half, t_head,
    kv_heads, slots, blocks, per_block, block_tokens, tail_tokens, high_part, low_part, base,
    CHUNK: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    ALIGNED: tl.constexpr, SIDES: tl.constexpr,
):  # fmt: skip
    layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.program_id(2).to(tl.int64)
    chunk = tl.load(moves + (layer * kv_heads + head) * slots + slot)
    if chunk >= 0:
        block = tl.minimum(chunk // per_block, blocks)
        address = tl.load(addresses + layer * (blocks + 1) + block)
        start = (chunk - block * per_block) * CHUNK
        channel = tl.arange(0, WIDTH)
        place = target + layer * t_layer + head * t_head + slot * (CHUNK * 2 * HALF)
        for side in range(SIDES):
            row = side * kv_heads + head
            out = place + side * t_half
            for first in range(0, CHUNK, TOKENS):
                token = first + tl.arange(0, TOKENS)
                real = (token < CHUNK)[:, None] & (channel < HALF)[None, :]
                there = out + token[:, None] * (2 * HALF) + channel[None, :]
                if block == blocks:
                    at = (row * tail_tokens + start + token)[:, None] * (2 * HALF)
                    source = address.to(tl.pointer_type(tl.int16)) + at + channel[None, :]
                    source = tl.multiple_of(source, (1, ALIGNED))
                    tl.store(there, tl.load(source, mask=real), mask=real)
                    tl.store(there + HALF, tl.load(source + HALF, mask=real), mask=real)
                else:
                    memory = address.to(tl.pointer_type(tl.uint8))
                    at = (row * block_tokens + start + token)[:, None]
                    # Addresses from a table: the compiler cannot infer their alignment.
                    low = memory + low_part + at * HALF + channel[None, :]
                    low = tl.multiple_of(low, (1, ALIGNED))
                    low = tl.load(low, mask=real, other=0).to(tl.int32)
                    high = memory + high_part + at * (2 * HALF) + channel[None, :]
                    high = tl.multiple_of(high, (1, ALIGNED))
                    bases = tl.multiple_of(memory + base + row * (2 * HALF) + channel, ALIGNED)
                    floor = floor_of(tl.load(bases, mask=channel < HALF, other=0))
                    bits = tl.load(high, mask=real, other=0).to(tl.int32)
                    bits = number_bits(bits, low & 15, floor[None, :])
                    tl.store(there, bits.to(tl.int16), mask=real)
                    floor = floor_of(tl.load(bases + HALF, mask=channel < HALF, other=0))
                    bits = tl.load(high + HALF, mask=real, other=0).to(tl.int32)
                    bits = number_bits(bits, low >> 4, floor[None, :])
                    tl.store(there + HALF, bits.to(tl.int16), mask=real)


def gather(moves: torch.Tensor, source: SplitChunkSource, target: torch.Tensor) -> None:
    """`gather_split.gather_split_chunks`."""
    layers, sides, kv_heads, slots, chunk, head_dim = target.shape
    numbers = target.view(torch.int16)
    width = next_power_of_2(head_dim // 2)
    tokens = min(_TOKENS, next_power_of_2(chunk))
    _gather_split_kernel[(layers, kv_heads, slots)](
        moves, source.addresses, numbers, *numbers.stride()[:3],
        kv_heads, slots, source.addresses.shape[1] - 1, source.block_tokens // chunk,
        source.block_tokens, source.tail_tokens, source.high, source.low, source.base,
        CHUNK=chunk, HALF=head_dim // 2, WIDTH=width, TOKENS=tokens,
        ALIGNED=math.gcd(head_dim // 2, _ALIGNED), SIDES=sides,
        # At most as many threads as read whole words, so that few requests cross the link.
        num_warps=max(1, min(4, tokens * width // (32 * _ALIGNED))),
    )  # fmt: skip
