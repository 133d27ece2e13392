"""Sizes and rates as people write them: 22GiB, 22g, 512MiB, 25GB/s."""

from __future__ import annotations

import re

from triforce_offload.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    **{p + "b": 1000 ** (i + 1) for i, p in enumerate("kmgt")},
    **{p + "ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")},
    # A single letter is a binary unit, as in other programs.
    **{p: 1024 ** (i + 1) for i, p in enumerate("kmgt")},
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)

_FLOPS = re.compile(
    r"\s*(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|-?\.\d+)\s*([kmgtp]?)(?:flops?)?(?:/s)?\s*", re.IGNORECASE
)

# Fewer bytes than this need a unit: a number of gibibytes is meant.
_LEAST_BYTES = 1024


def parse_bytes(text: str | int) -> int:
    """Return the bytes of `"22GiB"`, `"22g"` (equal), `"500MB"`, `"4096"` or an int. Raises
    UsageError.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise UsageError(f"{text!r} is not a size; write it like 22GiB or 512MiB")
        size = int(float(match[1]) * _UNITS[match[2].lower()])
        if not match[2] and 0 < size < _LEAST_BYTES:
            raise UsageError(f"{text!r} has no unit: write it like {text}GiB")
    if size <= 0:
        raise UsageError(f"a size must be positive, got {text!r}")
    return size


def parse_bandwidth(text: str | float) -> float:
    """Return bytes per second from `"25GB/s"`, `"800MB/s"` or a number. Raises UsageError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        rate = float(text)
        if not 0 < rate < float("inf"):
            raise UsageError(f"a bandwidth must be positive and finite, got {text!r}")
        return rate
    if not isinstance(text, str) or not text.endswith("/s"):
        raise UsageError(f"{text!r} is not a bandwidth; write it like 25GB/s or 800MB/s")
    return float(parse_bytes(text[:-2]))


def parse_flops(text: str | float) -> float:
    """Return operations per second from `"1.5TFLOP/s"`, `"900gflops"`, `"1.5e12"` or a number.
    Raises UsageError.
    """
    match = _FLOPS.fullmatch(str(text))
    if match is None:
        raise UsageError(f"{text!r} is not a rate of operations; write it like 1.5TFLOP/s")
    rate = float(match[1]) * 1000 ** ("kmgtp".index(match[2].lower()) + 1 if match[2] else 0)
    if not 0 < rate < float("inf"):
        raise UsageError(f"a rate of operations must be positive and finite, got {text!r}")
    return rate


def format_bytes(size: float) -> str:
    """Format a size in binary units, e.g. `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def parse_share(name: str, value: object) -> float:
    """Return a share from 0 to 1; "off" is 0. name: what the error calls it. Raises UsageError."""
    value = 0 if value == "off" else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UsageError(f"{name} must be auto, off or a share from 0 to 1, got {value!r}")
    return float(value)
