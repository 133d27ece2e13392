"""The codes of split: bfloat16 numbers in 12 bits, of which the high 8 are a number too.

A bfloat16 number is a sign, 8 bits of exponent and 7 of mantissa. Numbers that belong together (a
row of a matrix, a channel of a block of keys) share a base, the greatest of their exponents. Nearly
all of them lie within 13 powers of two of it, and most of what they add up to lies in the high two
of these. So the high byte tells more of those:

    high   sign; 8 to 95: one of the low 11 powers of two, and 3 bits of the mantissa;
            96 to 127: one of the high 2, and 4 bits of it
    low   low 4 bits of the mantissa, the first of which the high byte may have told too

A code of 0 is a zero, and one of 7 an exception: too small, infinite or no number at all. Others
code exponents to store or send bfloat16 in fewer bits (DFloat11, Zhang et al., 2025); here one of
the parts can also be computed with alone. Where .980 of SmolLM2-135M's drafts held with layers read
by 3 bits of mantissa for each of 15 powers .991 do so (256 tokens).

Bits are the numbers' own, as int16.
"""

from __future__ import annotations

import torch

# Of an high byte: the code; and what an exception has there.
CODE, EXCEPTION = 0x78, 0x07
_MAGNITUDE, _NOT_FINITE = 0x7FFF, 0x7F80
# The lowest power of two with a code is so many below the base.
BELOW = 12
# Codes below this one are of no number.
_FIRST = 8
# A code is the greater of two lines of what a number's magnitude is above that power, in steps of
# the mantissa: one for each 16 of these, and one for each 8, which meet at 96.
_SECOND_LINE = 80
_BYTES_SIGN = 0x80


def base_of(bits: torch.Tensor, dim: int) -> torch.Tensor:
    """The greatest exponent of the finite numbers along `dim`, which is kept: int16."""
    magnitude = bits & _MAGNITUDE
    finite = magnitude.amax(dim, keepdim=True)
    if (finite >= _NOT_FINITE).any():
        finite = magnitude.where(magnitude < _NOT_FINITE, 0).amax(dim, keepdim=True)
    return finite >> 7


def high_codes(bits: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high bytes, uint8, and which numbers are exceptions, bool. base: int16, as bits' shape
    broadcasts it.
    """
    # Above the lowest power; where it does not fit 16 bits it wraps around, to what has no code.
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
    """The low bytes: two numbers in each, the first half of the last dimension in the low 4 bits.
    uint8.
    """
    low = (bits & 15).to(torch.uint8)
    half = low.shape[-1] // 2
    return low[..., :half] | low[..., half:] << 4


def high_bits(high: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Sign, exponent and high mantissa where bfloat16 has them. What has no code is a zero.

    base: uint8, as high's shape broadcasts it
    """
    bits, sign = _above(high, 0, 0), _sign(high)
    bits += _floor(base)
    uncoded = high & CODE == 0
    # Asking takes a CPU less than choosing, and a GPU more.
    if high.device.type != "cpu" or uncoded.any():
        bits = bits.where(~uncoded, 0)
    return bits.bitwise_or_(sign)


def middle_bits(high: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """What the high bytes alone tell: the low bits are taken to be in the middle of what they
    may be, exceptions to be 0.
    """
    bits, sign = _above(high, 8, 4), _sign(high)
    bits += _floor(base)
    bits |= sign
    return bits.masked_fill_(high & CODE == 0, 0)


def add_low(bits: torch.Tensor, low: torch.Tensor) -> None:
    """Completes what `high_bits` gave."""
    half = bits.shape[-1] // 2
    bits[..., :half] |= low & 15
    bits[..., half:] |= low >> 4


def _above(high: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """How far a coded magnitude is above that of the lowest power: int16. first, second: what is
    added on either line.
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
