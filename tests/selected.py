"""Which tests run: the usual ones, and parts of the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import pytest


def parsed_part(text: str) -> tuple[int, int]:
    """The numbers of I/N. Raises ValueError."""
    index, parts = map(int, text.split("/"))
    if not 0 <= index < parts:
        raise ValueError(text)
    return index, parts


def divided(
    items: Iterable[pytest.Item], part: tuple[int, int] | None, *, on_gpu: bool
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests that run, and those that are left out: slow ones, and cases of grids beyond those that
    always run, of which one in N runs if `part` is I/N.

    Grids marked `one_in` are whole on a GPU, which takes little time for them.
    """
    index, parts = part or (0, 0)
    seen: set[str] = set()
    left: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        function = item.nodeid.split("[")[0]
        grid = item.get_closest_marker("one_in")
        further = function in seen and (
            item.get_closest_marker("first") is not None
            or (grid is not None and not on_gpu and _number(item.nodeid) % grid.args[0] != 0)
        )
        usual = item.get_closest_marker("slow") is None and not further
        # Other bits than those that choose cells of a grid.
        chosen = parts > 0 and (_number(item.nodeid) >> 32) % parts == index
        left[usual or chosen].append(item)
        seen.add(function)
    return left[True], left[False]


def _number(name: str) -> int:
    """A number of 64 bits for a name. CRC-32 would not do: of names that differ in a few letters,
    far more or fewer than one in 2 or 3 are multiples of that.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
