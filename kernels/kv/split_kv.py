"""Blocks of keys and values in 12 bits per number, bit for bit.

Numbers are encoded as in `split_codes`, with a base for each channel of a head in a block: the
numbers of a channel differ less from token to token than those of a token from channel to channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from triforce_kernels import limits
from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.split_codes import (
    add_low,
    base_of,
    high_bits,
    high_codes,
    low_codes,
)


class BlockParts(Protocol):
    """Where the parts of a split block begin: byte offsets in the block.

    rows: number of heads of keys and of values together
    room: number of exceptions that a block has room for
    nbytes: size of a block
    """

    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def high(self) -> int: ...
    @property
    def low(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def places(self) -> int: ...
    @property
    def patterns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class SplitKV:
    """A block's keys and values, [heads, tokens, head_dim] of bfloat16: first the heads of the
    keys, then those of the values.

    high: [heads, tokens, head_dim] uint8
    low: [heads, tokens, head_dim / 2] uint8
    base: [heads, head_dim] uint8, the greatest exponent of each channel's finite numbers
    places: [room] int32, places of exceptions in the whole block; after the last one the place of
        the block's first number, repeated
    patterns: [room] int16, the bits of the numbers at these places
    """

    high: torch.Tensor
    low: torch.Tensor
    base: torch.Tensor
    places: torch.Tensor
    patterns: torch.Tensor

    @classmethod
    def of(cls, block: torch.Tensor, at: BlockParts) -> SplitKV:
        """Return views of a block's bytes, flat uint8."""
        heads, tokens, head_dim = at.rows, at.tokens, at.head_dim
        numbers = heads * tokens * head_dim
        return cls(
            block[at.high : at.high + numbers].view(heads, tokens, head_dim),
            block[at.low : at.low + numbers // 2].view(heads, tokens, head_dim // 2),
            block[at.base : at.base + heads * head_dim].view(heads, head_dim),
            block[at.places : at.places + 4 * at.room].view(torch.int32),
            block[at.patterns : at.patterns + 2 * at.room].view(torch.int16),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, tokens, head_dim = self.high.shape
        return heads, tokens, head_dim


def encode_block(keys_values: torch.Tensor, into: SplitKV) -> torch.Tensor:
    """Encode a block, [heads, tokens, head_dim] bfloat16.

    Returns whether there is room for its exceptions, a bool on the device; if not, `into` is
    invalid. Raises ValueError.
    """
    _require("encode_block", into, keys_values)
    into.places.zero_()
    into.patterns.copy_(keys_values[0, 0, :1].view(torch.int16).expand_as(into.patterns))
    return implementation("encode_kv_block", keys_values.device)(keys_values, into)


def decode_blocks(blocks: torch.Tensor, at: BlockParts, into: torch.Tensor) -> None:
    """Decode any number of blocks with as many launches as one block takes.

    blocks: [blocks, at.nbytes or more] uint8, with contiguous rows
    into: [blocks, heads, tokens, head_dim] bfloat16, the last dimension contiguous

    Allocates no temporaries besides those of the computation: a pass decodes a thousand blocks.
    Raises ValueError.
    """
    require(
        "decode_blocks",
        blocks.dim() == 2
        and blocks.dtype == torch.uint8
        and blocks.shape[1] >= at.nbytes
        and blocks.stride(1) == 1
        and into.shape == (len(blocks), at.rows, at.tokens, at.head_dim)
        and into.dtype == torch.bfloat16
        and into.stride(3) == 1
        and at.head_dim % 2 == 0
        and into.device == blocks.device,
        blocks=blocks,
        parts=at,
        into=into,
    )
    implementation("decode_kv_blocks", into.device)(blocks, at, into)


def decode_chunks(
    split: SplitKV, heads: torch.Tensor, chunks: torch.Tensor, tokens: int, sides: int = 2
) -> torch.Tensor:
    """Return chunks of `tokens` tokens, keys and values, [sides, n, tokens, head_dim] bfloat16, for
    drafting: exceptions are read as zeros, or as less than any normal number.

    heads, chunks: [n] int64, KV heads and chunks of the block
    sides: 1 if keys are the values too. Raises ValueError.
    """
    rows, whole, head_dim = split.shape
    require(
        "decode_chunks",
        rows % sides == 0 and whole % tokens == 0 and heads.shape == chunks.shape,
        heads=heads,
        chunks=chunks,
        tokens=tokens,
        high=split.high,
    )

    def chosen(plane: torch.Tensor) -> torch.Tensor:
        in_chunks = plane.view(sides, rows // sides, whole // tokens, tokens, plane.shape[2])
        return in_chunks[:, heads, chunks]

    base = split.base.view(sides, rows // sides, 1, head_dim)[:, heads]
    bits = high_bits(chosen(split.high), base)
    add_low(bits, chosen(split.low))
    return bits.view(torch.bfloat16)


def reference_encode(keys_values: torch.Tensor, into: SplitKV) -> torch.Tensor:
    known = 0
    for first, part in _slices(into):
        bits = keys_values[part].contiguous().view(torch.int16)
        base = base_of(bits, 1)
        into.base[part] = base.squeeze(1)
        into.high[part], outside = high_codes(bits, base)
        into.low[part] = low_codes(bits)
        found = outside.flatten().nonzero().squeeze(1)
        end = known + len(found)
        if end > len(into.places):
            return torch.tensor(False)
        into.places[known:end] = found + first * bits[0].numel()
        into.patterns[known:end] = bits.flatten()[found]
        known = end
    return torch.tensor(True)


def reference_decode(blocks: torch.Tensor, at: BlockParts, into: torch.Tensor) -> None:
    for block, target in zip(blocks, into.view(torch.int16), strict=True):
        split = SplitKV.of(block, at)
        for _, part in _slices(split):
            bits = high_bits(split.high[part], split.base[part].unsqueeze(1))
            add_low(bits, split.low[part])
            target[part] = bits
        _put_exceptions(split, target)


def _put_exceptions(split: SplitKV, target: torch.Tensor) -> None:
    """Write the listed exceptions. target: the block's bits, int16"""
    heads, tokens, head_dim = split.shape
    places = split.places.clamp(0, heads * tokens * head_dim - 1)
    token = places // head_dim
    target[token // tokens, token % tokens, places % head_dim] = split.patterns


def _slices(split: SplitKV) -> Iterator[tuple[int, slice]]:
    """Yield the heads that are encoded at a time: the index of the first, and the slice."""
    heads, tokens, head_dim = split.shape
    step = max(1, limits.KV_CODED_AT_ONCE // (tokens * head_dim))
    for first in range(0, heads, step):
        yield first, slice(first, min(first + step, heads))


def _require(kernel: str, split: SplitKV, keys_values: torch.Tensor) -> None:
    heads, tokens, head_dim = split.shape
    tensors = (split.high, split.low, split.base, split.places, split.patterns)
    require(
        kernel,
        keys_values.shape == split.shape
        and keys_values.dtype == torch.bfloat16
        and keys_values.stride(2) == 1
        and head_dim % 2 == 0
        and split.low.shape == (heads, tokens, head_dim // 2)
        and split.base.shape == (heads, head_dim)
        and split.places.shape == split.patterns.shape
        and [part.dtype for part in tensors] == [torch.uint8] * 3 + [torch.int32, torch.int16]
        and all(part.is_contiguous() for part in tensors)
        and all(part.device == keys_values.device for part in tensors),
        keys_values=keys_values,
        high=split.high,
        low=split.low,
        base=split.base,
        places=split.places,
        patterns=split.patterns,
    )
