"""Copies selected chunks from split blocks in any location to their slots.

This is `gather` for blocks encoded by `split_kv`. Exceptions of a block are read as zeros, or as
less than any normal number, which is good enough for drafting.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation
from triforce_kernels.kv.gather import ChunkSource, require_moves
from triforce_kernels.kv.split_kv import SplitKV, decode_chunks


@dataclass(frozen=True)
class SplitChunkSource(ChunkSource):
    """A ChunkSource of split blocks; the tail is plain bfloat16.

    high, low, base: byte offsets of these parts in a block
    """

    high: int
    low: int
    base: int


def gather_split_chunks(
    moves: torch.Tensor, source: SplitChunkSource, target: torch.Tensor
) -> None:
    """Copy, for each layer, KV head and slot, the chunk that `moves` names, if any.

    moves: [layers, kv_heads, slots] int64, -1 for none
    target: [layers, sides, kv_heads, slots, chunk, head_dim] bfloat16, the last three contiguous

    Every source must have its bytes when the device executes this call. Raises ValueError.
    """
    require_moves("gather_split_chunks", moves, source, target)
    require(
        "gather_split_chunks",
        target.dtype == torch.bfloat16 and target.shape[5] % 2 == 0,
        target=target,
    )
    implementation("gather_split_chunks", target.device)(moves, source, target)


def reference_gather(moves: torch.Tensor, source: SplitChunkSource, target: torch.Tensor) -> None:
    """Copy one chunk after another, from addresses that the processor can read."""
    _, sides, kv_heads, _, chunk, head_dim = target.shape
    rows, tokens = sides * kv_heads, source.block_tokens
    per_block = tokens // chunk
    last = source.addresses.shape[1] - 1

    def there(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    none = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int16)
    for layer, head, slot in (moves >= 0).nonzero().tolist():
        index = int(moves[layer, head, slot])
        block = min(index // per_block, last)
        address = int(source.addresses[layer, block])
        if block == last:
            size = (sides, kv_heads, source.tail_tokens, head_dim)
            start = (index - block * per_block) * chunk
            tail = there(address, torch.bfloat16, *size)
            target[layer, :, head, slot] = tail[:, head, start : start + chunk]
            continue
        split = SplitKV(
            there(address + source.high, torch.uint8, rows, tokens, head_dim),
            there(address + source.low, torch.uint8, rows, tokens, head_dim // 2),
            there(address + source.base, torch.uint8, rows, head_dim),
            *none,
        )
        which = torch.tensor([head]), torch.tensor([index - block * per_block])
        target[layer, :, head, slot] = decode_chunks(split, *which, chunk, sides)[:, 0]
