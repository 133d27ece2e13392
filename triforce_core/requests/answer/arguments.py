"""The arguments of tool calls: JSON that every client can read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

# Deeper values are no arguments: reading and writing them could exceed Python's recursion limit.
MOST_DEEP = 64
_SURROGATES = re.compile("[\ud800-\udfff]")


def loaded(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError, also for NaN and infinite numbers, which Python's own reader accepts.
    """
    try:
        return DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def dumped(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON. Lone surrogates, which are not UTF-8, become U+FFFD.

    Raises ValueError for values that are nested too deeply.
    """
    check_depth(arguments)
    return _SURROGATES.sub("\ufffd", json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def as_arguments(text: str) -> str:
    """Return a JSON object as `dumped` writes it. Blank text is an empty object.

    Raises ValueError if the text is no JSON object.
    """
    given = loaded(text) if text.strip() else {}
    if not isinstance(given, dict):
        raise ValueError("the arguments of a call are an object")
    return dumped(given)


def check_depth(value: object, depth: int = 0) -> None:
    """Raise ValueError for a JSON value that is nested too deeply."""
    if depth > MOST_DEEP:
        raise ValueError("the value is nested too deeply")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        if isinstance(each, (dict, list)):
            check_depth(each, depth + 1)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


# Reads JSON. Raises ValueError as `loaded` does, and RecursionError.
DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
