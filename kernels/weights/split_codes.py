"""The codes of split numbers: bfloat16 in 12 bits, of which the high 8 are a number by themselves.

A bfloat16 number has a sign, 8 bits of exponent and 7 of mantissa. Numbers that belong together (a
row of a matrix, a channel of a block of keys) share a base, their greatest exponent. Nearly all of
them are within 13 powers of two of the base, and most of their sum comes from the highest two of
these powers. So the high byte has one more mantissa bit for those two:
    high  sign; 8 to 95: one of the low 11 powers of two, and 3 bits of the mantissa;
          96 to 127: one of the high 2, and 4 bits of the mantissa
    low   low 4 bits of the mantissa, the first of which may also be in the high byte

A code of 0 is a zero, and a code of 7 an exception: too small, infinite or NaN. Others encode
exponents to store or send bfloat16 in fewer bits (DFloat11, Zhang et al., 2025); here one of the
parts can also be computed with alone. SmolLM2-135M accepts .991 of the drafts made with these
codes, and .980 with 3 bits of mantissa for each of 15 powers (256 tokens).

`bits` are the bit patterns of numbers, as int16.
"""

from __future__ import annotations

import torch

# Bits of a high byte that are all 0 if it has no code for a power of two; the code of an exception.
CODE, EXCEPTION = 0x78, 0x07
_MAGNITUDE, _NOT_FINITE = 0x7FFF, 0x7F80
# The lowest power of two with a code is this far below the base.
BELOW = 12
# Codes below this one are no power of two.
_FIRST = 8
# A code is the greater of two lines over the magnitude above the lowest power, in steps of the
# mantissa: one line rises by 1 every 16 steps, the other every 8; they meet at 96.
_SECOND_LINE = 80
_BYTES_SIGN = 0x80


def base_of(bits: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the greatest exponent of the finite numbers along `dim`, which is kept: int16."""
    magnitude = bits & _MAGNITUDE
    finite = magnitude.amax(dim, keepdim=True)
    if (finite >= _NOT_FINITE).any():
        finite = magnitude.where(magnitude < _NOT_FINITE, 0).amax(dim, keepdim=True)
    return finite >> 7


def high_codes(bits: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high bytes, uint8, and which numbers are exceptions, bool.

    base: int16, broadcast to the shape of bits
    """
    # Magnitude above the lowest power. If it does not fit in 16 bits it wraps around, to a value
    # without a code.
    above = bits & _MAGNITUDE
    above -= (base - BELOW) << 7
    outside = above < 0
    outside |= above >= (BELOW + 1) << 7
    high = above >> 4
    high += _FIRST
    above >>= 3
    above -= _SECOND_LINE
    high = torch.maximum(high, above, out=high)
    sign = (bits >> 8) & _BYTES_SIGN
    high |= sign
    if outside.any():
        zero = bits & _MAGNITUDE == 0
        high = high.where(~(outside & zero), sign)
        outside &= ~zero
        high.masked_fill_(outside, EXCEPTION)
    return high.to(torch.uint8), outside


def low_codes(bits: torch.Tensor) -> torch.Tensor:
    """Return the low bytes, uint8.

    Each has two numbers, those of the first half of the last dimension in the low 4 bits.
    """
    low = (bits & 15).to(torch.uint8)
    half = low.shape[-1] // 2
    return low[..., :half] | low[..., half:] << 4


def high_bits(high: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return sign, exponent and high mantissa in their bfloat16 positions. A number without a code
    is a zero.

    base: uint8, broadcast to the shape of high
    """
    bits, sign = _above(high, 0, 0), _sign(high)
    bits += _floor(base)
    uncoded = high & CODE == 0
    # A test costs a CPU less than a selection, and a GPU more.
    if high.device.type != "cpu" or uncoded.any():
        bits = bits.where(~uncoded, 0)
    return bits.bitwise_or_(sign)


def middle_bits(high: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the numbers as far as the high bytes define them: the low bits are in the middle of
    their range, and exceptions are 0.
    """
    bits, sign = _above(high, 8, 4), _sign(high)
    bits += _floor(base)
    bits |= sign
    return bits.masked_fill_(high & CODE == 0, 0)


def add_low(bits: torch.Tensor, low: torch.Tensor) -> None:
    """Add the low bits to the result of `high_bits`, in place."""
    half = bits.shape[-1] // 2
    bits[..., :half] |= low & 15
    bits[..., half:] |= low >> 4


def _above(high: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Return how far a coded magnitude is above that of the lowest power: int16. first, second:
    number added on each line
    """
    above = (high & ~_BYTES_SIGN & 0xFF).to(torch.int16)
    other = above << 3
    other += (_SECOND_LINE << 3) + second
    above <<= 4
    above += first - (_FIRST << 4)
    return torch.minimum(above, other, out=above)


def _sign(high: torch.Tensor) -> torch.Tensor:
    return (high & _BYTES_SIGN).to(torch.int16) << 8


def _floor(base: torch.Tensor) -> torch.Tensor:
    return (base.to(torch.int16) - BELOW) << 7
