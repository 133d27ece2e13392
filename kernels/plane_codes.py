"""The codes of planes: bfloat16 numbers in 12 bits, of which the upper 8 are a number too.

A bfloat16 number is a sign, 8 bits of exponent and 7 of mantissa. Numbers that belong together (a
row of a matrix, a channel of a block of keys) share a base, the greatest of their exponents. Nearly
all of them lie within 15 powers of two of it, so 4 bits tell which one it is:

    upper   sign; exponent above that of the floor, 1 to 15; upper 3 bits of the mantissa
    lower   lower 4 bits of the mantissa

A code of 0 is a zero, or, with all bits of the upper mantissa, an exception: too small, infinite or
no number at all. Others code exponents to store or send bfloat16 in fewer bits (DFloat11, Zhang et
al., 2025); here one of the parts can also be computed with alone.

Bits are the numbers' own, as int16.
"""

from __future__ import annotations

import torch

# Of an upper byte: the code; and what an exception has there.
CODE, EXCEPTION = 0x78, 0x07
_MAGNITUDE, _NOT_FINITE = 0x7FFF, 0x7F80
# Powers of two that numbers of a base span.
_SPAN = 15
# Where sign, code and upper mantissa end up in 16 bits.
_UPPER = 0x87F0 - 0x10000
# The middle of the lower 4 bits of a mantissa.
_MIDDLE = 8


def base_of(bits: torch.Tensor, dim: int) -> torch.Tensor:
    """The greatest exponent of the finite numbers along `dim`, which is kept: int16."""
    magnitude = bits & _MAGNITUDE
    finite = magnitude.amax(dim, keepdim=True)
    if (finite >= _NOT_FINITE).any():
        finite = magnitude.where(magnitude < _NOT_FINITE, 0).amax(dim, keepdim=True)
    return finite >> 7


def upper_codes(bits: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper bytes, uint8, and which numbers are exceptions, bool. base: int16, as bits' shape
    broadcasts it.
    """
    # The code where bits of an exponent are; wraps around where it does not fit 16 bits, to what is
    # no code either.
    magnitude = bits & _MAGNITUDE
    magnitude -= (base - _SPAN) << 7
    upper = magnitude >> 4
    outside = magnitude < 1 << 7
    outside |= magnitude >= (_SPAN + 1) << 7
    sign = (bits >> 8) & 0x80
    upper |= sign
    if outside.any():
        zero = bits & _MAGNITUDE == 0
        upper = upper.where(~(outside & zero), sign)
        outside &= ~zero
        upper.masked_fill_(outside, EXCEPTION)
    return upper.to(torch.uint8), outside


def lower_codes(bits: torch.Tensor) -> torch.Tensor:
    """The lower bytes: two numbers in each, the first half of the last dimension in the low 4 bits.
    uint8.
    """
    low = (bits & 15).to(torch.uint8)
    half = low.shape[-1] // 2
    return low[..., :half] | low[..., half:] << 4


def upper_bits(upper: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Sign, exponent and upper mantissa where bfloat16 has them. What has no code is a zero.

    base: uint8, as upper's shape broadcasts it
    """
    bits = upper.view(torch.int8).to(torch.int16) << 4
    bits &= _UPPER
    bits += (base.to(torch.int16) - _SPAN) << 7
    uncoded = upper & CODE == 0
    # Asking takes a CPU less than choosing, and a GPU more.
    if upper.device.type != "cpu" or uncoded.any():
        bits = bits.where(~uncoded, (upper & 0x80).to(torch.int16) << 8)
    return bits


def middle_bits(upper: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """What the upper bytes alone tell: the lower bits are taken to be in the middle of what they
    may be, exceptions to be 0.
    """
    bits = upper_bits(upper, base)
    bits += _MIDDLE
    return bits.masked_fill_(upper & CODE == 0, 0)


def add_lower(bits: torch.Tensor, lower: torch.Tensor) -> None:
    """Completes what `upper_bits` gave."""
    half = bits.shape[-1] // 2
    bits[..., :half] |= lower & 15
    bits[..., half:] |= lower >> 4
