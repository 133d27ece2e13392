"""Numbers as integers of 8 bits, times a scale.

Rounding is floor(x + 1/2), which a GPU and a processor compute alike.
"""

from __future__ import annotations

import torch

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation

# The greatest integer. -128 is not used, so that both signs have the same range.
MOST_WHOLE = 127


def rounded(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return int8, in the shape of the numbers: the nearest of -127 to 127 times the scale.

    scale: float32, positive, of a shape that broadcasts to the shape of the numbers
    """
    whole = (numbers / scale).add_(0.5).floor_()
    return whole.clamp_(-MOST_WHOLE, MOST_WHOLE).to(torch.int8)


def scale_of(peak: torch.Tensor) -> torch.Tensor:
    """Return the float32 scale with the finest steps for numbers up to `peak`. Never 0."""
    return (peak.float() / MOST_WHOLE).clamp_(min=torch.finfo(torch.float32).tiny)


def round_chunks(
    moves: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, target: torch.Tensor
) -> None:
    """Round the numbers of each layer, KV head and slot for which `moves` names a chunk.

    moves: [layers, kv_heads, slots] int64, -1 for none
    numbers: [layers, sides, kv_heads, slots, chunk, head_dim], the last three contiguous
    scale: [layers, sides, kv_heads, head_dim] float32
    target: int8, in the shape of `numbers`, the last three dimensions contiguous

    Raises ValueError.
    """
    layers, sides, kv_heads, slots, chunk, head_dim = numbers.shape
    inner = (chunk * head_dim, head_dim, 1)
    require(
        "round_chunks",
        sides in (1, 2)
        and target.shape == numbers.shape
        and numbers.stride()[3:] == target.stride()[3:] == inner
        and moves.shape == (layers, kv_heads, slots)
        and scale.shape == (layers, sides, kv_heads, head_dim)
        and moves.is_contiguous()
        and scale.is_contiguous()
        and (moves.dtype, scale.dtype, target.dtype) == (torch.int64, torch.float32, torch.int8)
        and moves.device == numbers.device == scale.device == target.device,
        moves=moves,
        numbers=numbers,
        scale=scale,
        target=target,
    )
    implementation("round_chunks", target.device)(moves, numbers, scale, target)


def reference_round_chunks(
    moves: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, target: torch.Tensor
) -> None:
    moved = (moves >= 0)[:, None, :, :, None, None]
    whole = rounded(numbers, scale[:, :, :, None, None])
    target.copy_(torch.where(moved, whole, target))
