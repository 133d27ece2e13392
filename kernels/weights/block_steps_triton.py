"""Blocks of each type on a GPU, decoded by steps of whole bytes of quants.

A byte has two numbers. The low halves of a step's bytes are adjacent in the row, and so are the
high halves, so nothing is interleaved: see `step_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Layout of the numbers of a step: bytes of quants, and steps per block.
SHAPES = {
    "Q4_0": (16, 1),
    "Q4_1": (16, 1),
    "Q5_0": (16, 1),
    "Q5_1": (16, 1),
    "Q8_0": (16, 1),
    "MXFP4": (16, 1),
    "NVFP4": (32, 2),
    "F8_E4M3": (32, 2),
    "F8_HIGH": (32, 2),
    "Q4_K": (32, 4),
    "Q5_K": (32, 4),
    "Q6_K": (32, 4),
    "Q5_K_HIGH": (32, 4),
    "Q6_K_HIGH": (32, 4),
    "INT4_32": (16, 1),
    "INT4_64": (32, 1),
    "INT4_128": (32, 2),
    "INT8_32": (16, 1),
    "INT8_64": (32, 1),
    "INT8_128": (32, 2),
    "Q2_K": (32, 4),
    "Q3_K": (32, 4),
    "IQ4_NL": (16, 1),
    "IQ4_XS": (16, 8),
    "IQ3_XXS": (32, 4),
    "IQ3_S": (32, 4),
    "IQ2_XXS": (32, 4),
    "IQ2_XS": (32, 4),
    "IQ2_S": (32, 4),
}


@triton.jit
def _half(place):
    """Return the half-precision number at an even byte address."""
    return tl.load(place.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _eight(place):
    """Return numbers of 8 bits, 4 of exponent and 3 of mantissa. As half-precision numbers with the
    same bits they would be a 256th of their value, subnormal ones too.
    """
    bits = tl.load(place).to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _four(code):
    """Return twice the numbers of 4 bits: 2 of exponent, 1 of mantissa. As half-precision numbers
    with the same bits they would be 2^-14 of their value, subnormal ones too.
    """
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0


@triton.jit
def _level(code, signs, byte):
    """Return what codes of F8_HIGH stand for (`blocks.F8_LEVELS`). signs: place of their bits"""
    low, octave = code & 3, code >> 2
    first = 4 * low + tl.where(low < 2, 2, 1)
    size = tl.where(octave == 0, first, (4 * low + 17) << tl.maximum(octave - 1, 0))
    sign = (tl.load(signs + (byte // 8)[None, :]).to(tl.int32) >> (byte % 8)[None, :]) & 1
    return tl.where(sign == 1, -size, size).to(tl.float32)


@triton.jit
def _nonlinear(code):
    """Return what codes of IQ4 stand for (ggml's `kvalues_iq4nl`): a polynomial that is nearer than
    .44 to the 16 numbers, rounded. Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    A table would take a load, or several choices, for each number.
    """
    x = code.to(tl.float32)
    sum = tl.fma(x, 0.00158604, 0.0310864)
    sum = tl.fma(sum, x, -1.37193)
    sum = tl.fma(sum, x, 24.1738)
    return (tl.fma(sum, x, -126.567) + 12582912.0) - 12582912.0


@triton.jit
def _power(place):
    """Return half the power of two of an exponent of 8 bits, whose least ones are subnormal."""
    exponent = tl.load(place).to(tl.int32)
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _single(place):
    """Return the single-precision number at a byte address that is a multiple of 4."""
    return tl.load(place.to(tl.pointer_type(tl.float32)))


@triton.jit
def _byte(word, index):
    return (word >> (8 * index)) & 0xFF


@triton.jit
def _scales_and_leasts(block, part):
    """Return scales and minima of the two groups of 32 numbers of a step of Q4_K or Q5_K blocks,
    whose addresses are multiples of 4: two half-precision numbers, then 6 bits for each of the 8
    scales and 8 minima, packed into 12 bytes.
    """
    words = block.to(tl.pointer_type(tl.int32))
    both, first, second, third = (
        tl.load(words),
        tl.load(words + 1),
        tl.load(words + 2),
        tl.load(words + 3),
    )
    whole = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    whole_least = ((both >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    # Of the first four groups and of the last four.
    early = part < 2
    at = (2 * part) % 4
    own, other = _byte(first, at), _byte(second, at)
    own_next, other_next = _byte(first, at + 1), _byte(second, at + 1)
    packed, packed_next = _byte(third, at), _byte(third, at + 1)
    low = tl.where(early, own & 63, (packed & 15) | ((own >> 6) << 4))
    high = tl.where(early, own_next & 63, (packed_next & 15) | ((own_next >> 6) << 4))
    low_least = tl.where(early, other & 63, (packed >> 4) | ((other >> 6) << 4))
    high_least = tl.where(early, other_next & 63, (packed_next >> 4) | ((other_next >> 6) << 4))
    return (
        whole * low.to(tl.float32),
        whole_least * low_least.to(tl.float32),
        whole * high.to(tl.float32),
        whole_least * high_least.to(tl.float32),
    )


@triton.jit
def _word(place):
    """Return 4 bytes at an even address."""
    pair = place.to(tl.pointer_type(tl.uint16))
    return tl.load(pair).to(tl.int32) | (tl.load(pair + 1).to(tl.int32) << 16)


@triton.jit
def _zero_and_scale(block):
    """Return what blocks of integers begin with, [rows, 1] each (`block_types.INTEGERS`)."""
    word = tl.load(block.to(tl.pointer_type(tl.int32)))
    return (word & 255)[:, None], (word & ~255).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _of_halves(four, whole, byte, less: tl.constexpr):
    """Return the scales of two tiles of 32 numbers, [rows, 32] each. four: bytes [rows], a factor
    less `less` for each 16 numbers; whole: what they are multiplied by, [rows]
    """
    first = (byte < 16)[None, :]
    low = tl.where(first, (whole * (_byte(four, 0) - less).to(tl.float32))[:, None],
                   (whole * (_byte(four, 1) - less).to(tl.float32))[:, None])  # fmt: skip
    high = tl.where(first, (whole * (_byte(four, 2) - less).to(tl.float32))[:, None],
                    (whole * (_byte(four, 3) - less).to(tl.float32))[:, None])  # fmt: skip
    return low, high


@triton.jit
def _with_parity(seven):
    """Return bytes whose highest bit makes their number of bits even, from their other 7 bits. Bits
    of 0x6996 are the parities of 0 to 15.
    """
    odd = 0x6996 >> ((seven ^ (seven >> 4)) & 15)
    return seven | ((odd & 1) << 7)


@triton.jit
def _grid_three(block, group, word, KIND: tl.constexpr):
    """Return what IQ3 has of 8 words of 4 numbers of a group: the words' indices in a table, the
    signs of 8 numbers as a byte, and the scale, [rows, 8] or [rows, 1] each.
    """
    eight = (word // 2)[None, :]
    index = tl.load(block[:, None] + 2 + group * 8 + word[None, :]).to(tl.int32)
    if KIND == "IQ3_XXS":
        both = _word(block + 66 + group * 4)
        signs = _with_parity((both[:, None] >> (7 * eight)) & 127)
        scale = _half(block) * (0.5 + ((both >> 28) & 15).to(tl.float32)) * 0.5
    else:
        upper = tl.load(block + 66 + group).to(tl.int32)
        index |= ((upper[:, None] >> word[None, :]) & 1) << 8
        signs = tl.load(block[:, None] + 74 + group * 4 + eight).to(tl.int32)
        four = tl.load(block + 106 + group // 2).to(tl.int32) >> (4 * (group % 2))
        scale = _half(block) * (1 + 2 * (four & 15)).to(tl.float32)
    return index, signs, scale[:, None]


@triton.jit
def _grid_two(block, group, word, KIND: tl.constexpr):
    """`_grid_three` for IQ2, whose stored indices are of two words."""
    eight = (word // 2)[None, :]
    if KIND == "IQ2_XXS":
        index = tl.load(block[:, None] + 2 + group * 8 + eight).to(tl.int32)
        both = _word(block + 6 + group * 8)
        signs = _with_parity((both[:, None] >> (7 * eight)) & 127)
        four = (both >> 28)[:, None]
    elif KIND == "IQ2_XS":
        pair = (block[:, None] + 2 + (group * 4 + eight) * 2).to(tl.pointer_type(tl.uint16))
        both = tl.load(pair).to(tl.int32)
        index, signs = both & 511, _with_parity(both >> 9)
        four = tl.load(block + 66 + group).to(tl.int32)[:, None] >> (4 * (eight // 2))
    else:
        upper = tl.load(block + 66 + group).to(tl.int32)[:, None] >> (2 * eight)
        index = tl.load(block[:, None] + 2 + group * 4 + eight).to(tl.int32)
        index |= (upper & 3) << 8
        signs = tl.load(block[:, None] + 34 + group * 4 + eight).to(tl.int32)
        four = tl.load(block + 74 + group).to(tl.int32)[:, None] >> (4 * (eight // 2))
    scale = _half(block)[:, None] * (0.5 + (four & 15).to(tl.float32)) * 0.25
    return index * 2 + (word % 2)[None, :], signs, scale


@triton.jit
def _of_grid(block, table, group, KIND: tl.constexpr):
    """Return a group of 32 numbers of IQ2 or IQ3, [rows, 32]: 8 words of 4. table: see `grids`"""
    place, one = tl.arange(0, 8), tl.arange(0, 4)[None, None, :]
    if KIND == "IQ3_XXS" or KIND == "IQ3_S":
        index, signs, scale = _grid_three(block, group, place, KIND)
    else:
        index, signs, scale = _grid_two(block, group, place, KIND)
    word = tl.load(table + index)
    signs = signs >> (place % 2 * 4)[None, :]
    number = _byte(word[:, :, None], one).to(tl.float32) * scale[:, :, None]
    number = tl.where(((signs[:, :, None] >> one) & 1) == 1, -number, number)
    return tl.reshape(number, [block.shape[0], 32])


@triton.jit
def step_of(
    row, table, index, part,
    KIND: tl.constexpr, BLOCK_BYTES: tl.constexpr, STEPS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Decode the numbers of a step of some rows.

    row: addresses [rows] of the rows' first bytes
    table: numbers of IQ2 and IQ3 (`grids`)
    index, part: the block of each row, and which of its steps

    Returns two tiles [rows, BYTES] of float32, and the column at which each begins.
    """
    block = row + index * BLOCK_BYTES
    byte = tl.arange(0, BYTES)
    start = index * (STEPS * 2 * BYTES)
    apart = BYTES
    if KIND == "Q8_0":
        place = block[:, None] + 2 + byte[None, :]
        scale = _half(block)[:, None]
        low = tl.load(place).to(tl.int8, bitcast=True).to(tl.float32) * scale
        high = tl.load(place + BYTES).to(tl.int8, bitcast=True).to(tl.float32) * scale
    elif (
        KIND == "IQ3_XXS" or KIND == "IQ3_S"
        or KIND == "IQ2_XXS" or KIND == "IQ2_XS" or KIND == "IQ2_S"
    ):  # fmt: skip
        start += part * 64
        low = _of_grid(block, table, 2 * part, KIND)
        high = _of_grid(block, table, 2 * part + 1, KIND)
    elif KIND == "IQ4_NL":
        both = tl.load(block[:, None] + 2 + byte[None, :]).to(tl.int32)
        scale = _half(block)[:, None]
        low, high = _nonlinear(both & 15) * scale, _nonlinear(both >> 4) * scale
    elif KIND == "IQ4_XS":
        # 32 numbers with a scale of 6 bits: 2 of them in two bytes for all, 4 in a half of a byte.
        both = tl.load(block[:, None] + 8 + part * 16 + byte[None, :]).to(tl.int32)
        upper = tl.load((block + 2).to(tl.pointer_type(tl.int16))).to(tl.int32) >> (2 * part)
        lower = tl.load(block + 4 + part // 2).to(tl.int32) >> (4 * (part % 2))
        six = (lower & 15) | ((upper & 3) << 4)
        scale = (_half(block) * (six - 32).to(tl.float32))[:, None]
        start += part * 32
        low, high = _nonlinear(both & 15) * scale, _nonlinear(both >> 4) * scale
    elif KIND == "Q2_K" or KIND == "Q3_K":
        # Each half of 128 numbers has 32 bytes with 2 bits of four numbers each. Scales are of 16
        # numbers.
        quants: tl.constexpr = 16 if KIND == "Q2_K" else 32
        half, pair = part // 2, part % 2
        four = tl.load(block[:, None] + quants + half * 32 + byte[None, :]).to(tl.int32)
        four = four >> (4 * pair)
        low, high = four & 3, (four >> 2) & 3
        start += half * 128 + pair * 64
        if KIND == "Q2_K":
            scales = tl.load((block + half * 8 + pair * 4).to(tl.pointer_type(tl.int32)))
            leasts = (scales >> 4) & 0x0F0F0F0F
            low_least, high_least = _of_halves(leasts, _half(block + 82), byte, 0)
            low_scale, high_scale = _of_halves(scales & 0x0F0F0F0F, _half(block + 80), byte, 0)
            low = low.to(tl.float32) * low_scale - low_least
            high = high.to(tl.float32) * high_scale - high_least
        else:
            thirds = tl.load(block[:, None] + byte[None, :]).to(tl.int32) >> (4 * half + 2 * pair)
            low, high = low - 4 + ((thirds & 1) << 2), high - 4 + (((thirds >> 1) & 1) << 2)
            # Of 6 bits less 32: 4 of them in 8 bytes, and 2 in 4 further bytes.
            lower = _word(block + 96 + pair * 4) >> (4 * half)
            upper = _word(block + 104) >> (4 * half + 2 * pair)
            scales = (lower & 0x0F0F0F0F) | ((upper & 0x03030303) << 4)
            low_scale, high_scale = _of_halves(scales, _half(block + 108), byte, 32)
            low, high = low.to(tl.float32) * low_scale, high.to(tl.float32) * high_scale
    elif KIND == "MXFP4":
        both = tl.load(block[:, None] + 1 + byte[None, :]).to(tl.int32)
        scale = _power(block)[:, None]
        low, high = _four(both & 15) * scale, _four(both >> 4) * scale
    elif KIND == "NVFP4":
        both = tl.load(block[:, None] + 12 + part * 32 + byte[None, :]).to(tl.int32)
        scales = block[:, None] + 4 + part * 4 + (byte // 16)[None, :]
        factor = _single(block)[:, None] * 0.5
        start += part * 64
        low, high = _four(both & 15), _four(both >> 4)
        low, high = low * (_eight(scales) * factor), high * (_eight(scales + 2) * factor)
    elif KIND == "F8_E4M3":
        place = block[:, None] + part * 64 + byte[None, :]
        scale = _single(block + 128)[:, None]
        start += part * 64
        low, high = _eight(place) * scale, _eight(place + BYTES) * scale
    elif KIND == "INT4_32" or KIND == "INT4_64" or KIND == "INT4_128":
        both = tl.load(block[:, None] + 4 + part * BYTES + byte[None, :]).to(tl.int32)
        zero, scale = _zero_and_scale(block)
        start += part * (2 * BYTES)
        low = ((both & 15) - zero).to(tl.float32) * scale
        high = ((both >> 4) - zero).to(tl.float32) * scale
    elif KIND == "INT8_32" or KIND == "INT8_64" or KIND == "INT8_128":
        place = block[:, None] + 4 + part * (2 * BYTES) + byte[None, :]
        zero, scale = _zero_and_scale(block)
        start += part * (2 * BYTES)
        low = (tl.load(place).to(tl.int32) - zero).to(tl.float32) * scale
        high = (tl.load(place + BYTES).to(tl.int32) - zero).to(tl.float32) * scale
    elif KIND == "F8_HIGH":
        both = tl.load(block[:, None] + 20 + part * 32 + byte[None, :]).to(tl.int32)
        signs, scale = block[:, None] + 4 + part * 8, _single(block)[:, None]
        start += part * 64
        low = _level(both & 15, signs, byte) * scale
        high = _level(both >> 4, signs + 4, byte) * scale
    elif KIND == "Q6_K" or KIND == "Q6_K_HIGH":
        # Each half of 128 numbers has 64 bytes of 4 bits, and 32 bytes with the other two bits, of
        # which blocks of high bits have none.
        half, quarter = part // 2, part % 2
        both = tl.load(block[:, None] + half * 64 + quarter * 32 + byte[None, :])
        low, high = (both & 15).to(tl.int32), (both >> 4).to(tl.int32)
        after: tl.constexpr = 128 if KIND == "Q6_K_HIGH" else 192
        if KIND == "Q6_K":
            upper = tl.load(block[:, None] + 128 + half * 32 + byte[None, :])
            low |= ((upper >> (2 * quarter)) & 3).to(tl.int32) << 4
            high |= ((upper >> (2 * quarter + 4)) & 3).to(tl.int32) << 4
        scales = block[:, None] + after + half * 8 + quarter * 2 + (byte // 16)[None, :]
        whole = _half(block + after + 16)[:, None]
        low_scale = tl.load(scales).to(tl.int8, bitcast=True).to(tl.float32) * whole
        high_scale = tl.load(scales + 4).to(tl.int8, bitcast=True).to(tl.float32) * whole
        start += half * 128 + quarter * 32
        apart = 64
        many: tl.constexpr = 4.0 if KIND == "Q6_K_HIGH" else 1.0
        middle: tl.constexpr = 30.5 if KIND == "Q6_K_HIGH" else 32.0
        low = (low.to(tl.float32) * many - middle) * low_scale
        high = (high.to(tl.float32) * many - middle) * high_scale
    elif KIND == "Q4_K" or KIND == "Q5_K" or KIND == "Q5_K_HIGH":
        # Pairs of groups of 32 numbers share their bytes; the fifth bits of all are in 32 bytes
        # before.
        quants: tl.constexpr = 48 if KIND == "Q5_K" else 16
        both = tl.load(block[:, None] + quants + part * 32 + byte[None, :])
        low, high = (both & 15).to(tl.int32), (both >> 4).to(tl.int32)
        if KIND == "Q5_K":
            fifth = tl.load(block[:, None] + 16 + byte[None, :])
            low |= ((fifth >> (2 * part)) & 1).to(tl.int32) << 4
            high |= ((fifth >> (2 * part + 1)) & 1).to(tl.int32) << 4
        low_scale, low_least, high_scale, high_least = _scales_and_leasts(block, part)
        start += part * 64
        low, high = low.to(tl.float32), high.to(tl.float32)
        if KIND == "Q5_K_HIGH":
            low, high = low * 2 + 0.5, high * 2 + 0.5
        low = low * low_scale[:, None] - low_least[:, None]
        high = high * high_scale[:, None] - high_least[:, None]
    else:
        five: tl.constexpr = KIND == "Q5_0" or KIND == "Q5_1"
        offset: tl.constexpr = KIND == "Q4_1" or KIND == "Q5_1"
        fifths: tl.constexpr = 4 if offset else 2
        after: tl.constexpr = fifths + 4 if five else fifths
        both = tl.load(block[:, None] + after + byte[None, :])
        low, high = (both & 15).to(tl.int32), (both >> 4).to(tl.int32)
        if five:
            # The fifth bit of each number, in order.
            bits = block[:, None] + fifths + (byte // 8)[None, :]
            low |= ((tl.load(bits) >> (byte % 8)[None, :]) & 1).to(tl.int32) << 4
            high |= ((tl.load(bits + 2) >> (byte % 8)[None, :]) & 1).to(tl.int32) << 4
        scale = _half(block)[:, None]
        if offset:
            least = _half(block + 2)[:, None]
            low, high = low.to(tl.float32) * scale + least, high.to(tl.float32) * scale + least
        else:
            centre: tl.constexpr = 16 if five else 8
            low = (low - centre).to(tl.float32) * scale
            high = (high - centre).to(tl.float32) * scale
    return low, high, start, start + apart
