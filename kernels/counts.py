"""Whole numbers for launches. On the host, Triton's functions of these names take 5 us a call."""

from __future__ import annotations


def cdiv(number: int, by: int) -> int:
    """Return number / by, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
