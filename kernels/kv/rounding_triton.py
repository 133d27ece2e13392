"""`rounding` on a GPU: one program for each slot of a KV head of a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import next_power_of_2

# Numbers of keys, and as many of values, that a program processes at once at most.
_AT_ONCE = 2048


@triton.jit
def whole_of(numbers, scale):
    """`rounding.rounded` for a tensor of any dtype."""
    # `/` would compile to a division that is sometimes off by one unit in the last place.
    whole = tl.floor(tl.div_rn(numbers.to(tl.float32), scale) + 0.5)
    return tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8)


@triton.jit(do_not_specialize=["slots"])
def _round_kernel(
    moves, numbers, scale, target, n_layer, n_half, n_head, t_layer, t_half, t_head,
    kv_heads, slots, CHUNK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SIDES: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    if tl.load(moves + (layer * kv_heads + head) * slots + slot) >= 0:
        source = numbers + layer * n_layer + head * n_head + slot * (CHUNK * DIM)
        place = target + layer * t_layer + head * t_head + slot * (CHUNK * DIM)
        for side in range(SIDES):
            of = scale + ((layer * SIDES + side) * kv_heads + head) * DIM
            # A chunk of one head is contiguous: [CHUNK, DIM].
            for first in range(0, CHUNK * DIM, WIDTH):
                inside = first + tl.arange(0, WIDTH)
                real = inside < CHUNK * DIM
                each = tl.load(source + side * n_half + inside, mask=real, other=0.0)
                step = tl.load(of + inside % DIM, mask=real, other=1.0)
                tl.store(place + side * t_half + inside, whole_of(each, step), mask=real)


def round_chunks(
    moves: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, target: torch.Tensor
) -> None:
    layers, sides, kv_heads, slots, chunk, head_dim = numbers.shape
    # Only the first dimension of the grid may exceed 65,535.
    _round_kernel[(slots, kv_heads, layers)](
        moves, numbers, scale, target, *numbers.stride()[:3], *target.stride()[:3],
        kv_heads, slots, CHUNK=chunk, DIM=head_dim, SIDES=sides,
        WIDTH=min(_AT_ONCE, next_power_of_2(chunk * head_dim)), num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
