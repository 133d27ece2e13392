"""Split blocks of keys and values, decoded by the processor's compiled kernels."""

from __future__ import annotations

import ctypes

import torch

from triforce_kernels.host.library import library
from triforce_kernels.host.structures import KVBlock
from triforce_kernels.kv.split_kv import BlockParts, SplitKV


def decode(blocks: torch.Tensor, at: BlockParts, into: torch.Tensor) -> None:
    """`split_kv.decode_blocks`."""
    for block, target in zip(blocks, into, strict=True):
        split, call = SplitKV.of(block, at), KVBlock()
        call.high, call.low, call.base = (
            part.data_ptr() for part in (split.high, split.low, split.base)
        )
        call.places, call.patterns = split.places.data_ptr(), split.patterns.data_ptr()
        call.out, call.room = target.data_ptr(), len(split.places)
        call.heads, call.tokens, call.head_dim = split.shape
        call.out_head, call.out_row = target.stride()[:2]
        library().triforce_decode_kv(ctypes.byref(call), torch.get_num_threads())
