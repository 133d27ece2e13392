"""`split_kv` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.kv.split_kv import BlockParts, SplitKV
from triforce_kernels.weights.split_bf16_triton import floor_of, number_bits
from triforce_kernels.weights.split_codes import EXCEPTION

_TOKENS = 64
# Exceptions that a program writes.
_ENTRIES = 256


@triton.jit
def _decode_kernel(
    blocks, high_at, low_at, base_at, places_at, patterns_at, out, block_bytes, out_block, out_head,
    out_token, tokens, half, room,
    TOKENS: tl.constexpr, HALF: tl.constexpr, ENTRIES: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Decode some tokens of a head of a block, or write some of a block's exceptions. What writes a
    number does not depend on when it does: numbers with the exceptions' code are left to the list,
    and where the list repeats the first number, it has that number's bits.
    """
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = tl.program_id(2).to(tl.int64)
    block = blocks + index * block_bytes
    out += index * out_block
    tiles = tl.cdiv(tokens, TOKENS)
    if tile < tiles:
        high_part, low_part, base = block + high_at, block + low_at, block + base_at
        token = tile * TOKENS + tl.arange(0, TOKENS)
        channel = tl.arange(0, HALF)
        real = (token < tokens)[:, None] & (channel < half)[None, :]
        row = (head * tokens + token)[:, None]
        low = tl.load(low_part + row * half + channel[None, :], mask=real, other=0).to(tl.int32)
        bases = base + head * 2 * half + channel
        highs = high_part + row * 2 * half + channel[None, :]
        place = out + head * out_head + token.to(tl.int64)[:, None] * out_token + channel[None, :]
        floor = floor_of(tl.load(bases, mask=channel < half, other=0))[None, :]
        first = tl.load(highs, mask=real, other=CODE).to(tl.int32)
        bits = number_bits(first, low & 15, floor)
        tl.store(place, bits.to(tl.int16), mask=real & ((first & 0x7F) != CODE))
        floor = floor_of(tl.load(bases + half, mask=channel < half, other=0))[None, :]
        second = tl.load(highs + half, mask=real, other=CODE).to(tl.int32)
        bits = number_bits(second, low >> 4, floor)
        tl.store(place + half, bits.to(tl.int16), mask=real & ((second & 0x7F) != CODE))
    else:
        places = (block + places_at).to(tl.pointer_type(tl.int32))
        patterns = (block + patterns_at).to(tl.pointer_type(tl.int16))
        part = (tile - tiles) * tl.num_programs(1) + head
        entry = part * ENTRIES + tl.arange(0, ENTRIES)
        there = entry < room
        number = tl.load(places + entry, mask=there, other=0).to(tl.int64)
        line = number // (2 * half)
        target = out + line // tokens * out_head + line % tokens * out_token + number % (2 * half)
        tl.store(target, tl.load(patterns + entry, mask=there, other=0), mask=there)


@triton.jit
def _base_kernel(
    x, base, x_head, x_token, tokens, head_dim, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, CHANNELS)
    real = (token < tokens)[:, None] & (channel < head_dim)[None, :]
    place = x + head * x_head + token.to(tl.int64)[:, None] * x_token + channel[None, :]
    magnitude = tl.load(place, mask=real, other=0).to(tl.int32) & 0x7FFF
    finite = tl.where(magnitude < 0x7F80, magnitude, 0)
    greatest = tl.max(finite, 0) >> 7
    tl.atomic_max(base + head * head_dim + channel, greatest, mask=channel < head_dim)


@triton.jit
def _code(bits, floor):
    """Return the high byte, and whether the number is an exception."""
    magnitude = bits & 0x7FFF
    above = magnitude - (floor << 7)
    inside = (above >= 0) & (above < 13 << 7)
    exception = (inside == 0) & (magnitude > 0)
    sign = (bits >> 8) & 0x80
    code = tl.maximum((above >> 4) + 8, (above >> 3) - 80)
    high_part = tl.where(inside, sign | code, tl.where(exception, 7, sign))
    return high_part, exception


@triton.jit
def _list(bits, place, exception, places, patterns, known, room):
    """Append exceptions to the list, as far as it has room."""
    entry = tl.atomic_add(known + tl.zeros_like(place).to(tl.int32), 1, mask=exception)
    fits = exception & (entry < room)
    tl.store(places + entry, place.to(tl.int32), mask=fits)
    tl.store(patterns + entry, bits.to(tl.int16), mask=fits)


@triton.jit
def _encode_kernel(
    x, high_part, low_part, base, places, patterns, known, x_head, x_token, tokens, half, room,
    TOKENS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, HALF)
    real = (token < tokens)[:, None] & (channel < half)[None, :]
    source = x + head * x_head + token.to(tl.int64)[:, None] * x_token + channel[None, :]
    floors = base + head * 2 * half + channel
    row = (head * tokens + token)[:, None]
    place = row * 2 * half + channel[None, :]
    bits = tl.load(source, mask=real, other=0).to(tl.int32)
    floor = floor_of(tl.load(floors, mask=channel < half, other=0))
    coded, exception = _code(bits, floor[None, :])
    tl.store(high_part + place, coded.to(tl.uint8), mask=real)
    _list(bits, place, exception, places, patterns, known, room)
    low = bits & 15
    bits = tl.load(source + half, mask=real, other=0).to(tl.int32)
    floor = floor_of(tl.load(floors + half, mask=channel < half, other=0))
    coded, exception = _code(bits, floor[None, :])
    tl.store(high_part + place + half, coded.to(tl.uint8), mask=real)
    _list(bits, place + half, exception, places, patterns, known, room)
    low |= (bits & 15) << 4
    tl.store(low_part + row * half + channel[None, :], low.to(tl.uint8), mask=real)


def encode(keys_values: torch.Tensor, into: SplitKV) -> torch.Tensor:
    """`split_kv.encode_block`."""
    heads, tokens, head_dim = into.shape
    bits, half = keys_values.view(torch.int16), head_dim // 2
    base = torch.zeros((heads, head_dim), dtype=torch.int32, device=bits.device)
    known = torch.zeros(1, dtype=torch.int32, device=bits.device)
    grid = (cdiv(tokens, _TOKENS), heads)
    strides = bits.stride(0), bits.stride(1)
    _base_kernel[grid](
        bits, base, *strides, tokens, head_dim,
        TOKENS=_TOKENS, CHANNELS=next_power_of_2(head_dim),
    )  # fmt: skip
    into.base.copy_(base)
    _encode_kernel[grid](
        bits, into.high, into.low, base, into.places, into.patterns, known, *strides, tokens,
        half, len(into.places), TOKENS=_TOKENS, HALF=next_power_of_2(half),
    )  # fmt: skip
    return known[0] <= len(into.places)


def decode(blocks: torch.Tensor, at: BlockParts, into: torch.Tensor) -> None:
    """`split_kv.decode_blocks`."""
    heads, tokens, head_dim, count = at.rows, at.tokens, at.head_dim, len(blocks)
    if not count:
        return
    out, half = into.view(torch.int16), head_dim // 2
    grid = cdiv(tokens, _TOKENS) + cdiv(at.room, _ENTRIES * heads), heads, count
    _decode_kernel[grid](
        blocks, at.high, at.low, at.base, at.places, at.patterns, out, blocks.stride(0),
        *out.stride()[:3], tokens, half, at.room,
        TOKENS=_TOKENS, HALF=next_power_of_2(half), ENTRIES=_ENTRIES, CODE=EXCEPTION,
    )  # fmt: skip
