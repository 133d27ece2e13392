"""Copies selected chunks of keys and values from any location to their slots."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation


@dataclass(frozen=True)
class ChunkSource:
    """Keys and values of all layers by address: blocks of equal size, then a tail.

    addresses: [layers, blocks + 1] int64 on the device; each points to [sides, kv_heads, n,
        head_dim], with n = block_tokens, the last with n = tail_tokens, at multiples of 16 bytes.
        The memory is on the device, or host memory registered with the driver, which the device
        reads in place. (The reference reads memory that the processor can read.)
    block_tokens, tail_tokens: tokens of a block and of a tail
    """

    addresses: torch.Tensor
    block_tokens: int
    tail_tokens: int


def gather_chunks(moves: torch.Tensor, source: ChunkSource, target: torch.Tensor) -> None:
    """Copy, for each layer, KV head and slot, the chunk that `moves` names, if any.

    moves: [layers, kv_heads, slots] int64, -1 for none
    target: [layers, sides, kv_heads, slots, chunk, head_dim], the last three contiguous: keys and
        values, or one side that is both

    Every source must have its bytes when the device executes this call. Raises ValueError.
    """
    require_moves("gather_chunks", moves, source, target)
    implementation("gather_chunks", target.device)(moves, source, target)


def require_moves(
    kernel: str, moves: torch.Tensor, source: ChunkSource, target: torch.Tensor
) -> None:
    """Raise ValueError, in the name of `kernel`, unless the inputs fit together."""
    layers, sides, kv_heads, slots, chunk, head_dim = target.shape
    addresses = source.addresses
    require(
        kernel,
        moves.shape == (layers, kv_heads, slots)
        and moves.is_contiguous()
        and moves.dtype == addresses.dtype == torch.int64
        and moves.device == addresses.device == target.device
        and addresses.shape[0] == layers
        and addresses.is_contiguous()
        and sides in (1, 2)
        and target.stride()[3:] == (chunk * head_dim, head_dim, 1)
        and source.block_tokens % chunk == 0,
        moves=moves,
        addresses=addresses,
        target=target,
        block_tokens=source.block_tokens,
        tail_tokens=source.tail_tokens,
    )


def reference_gather(moves: torch.Tensor, source: ChunkSource, target: torch.Tensor) -> None:
    """Copy one chunk after another, from addresses that the processor can read."""
    _, sides, kv_heads, _, chunk, head_dim = target.shape
    per_block = source.block_tokens // chunk
    last = source.addresses.shape[1] - 1
    for layer, head, slot in (moves >= 0).nonzero().tolist():
        index = int(moves[layer, head, slot])
        block = min(index // per_block, last)
        tokens = source.tail_tokens if block == last else source.block_tokens
        shape = (sides, kv_heads, tokens, head_dim)
        count = sides * kv_heads * tokens * head_dim
        memory = (ctypes.c_uint8 * (count * target.dtype.itemsize)).from_address(
            int(source.addresses[layer, block])
        )
        there = torch.frombuffer(memory, dtype=target.dtype, count=count).view(shape)
        start = (index - block * per_block) * chunk
        target[layer, :, head, slot] = there[:, head, start : start + chunk]
