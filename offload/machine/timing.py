"""Timing on a machine that others may use at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Each rate is measured in this many windows of this many seconds: other users of the machine
# disturb some of them.
_WINDOWS, _WINDOW_SECONDS = 5, 0.05


def seconds_of(run: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> float:
    """Return the seconds of one run: the smallest median of several windows, after a warm-up."""
    run()
    settle()
    medians = []
    for _ in range(_WINDOWS):
        taken: list[float] = []
        while sum(taken) < _WINDOW_SECONDS:
            began = time.perf_counter()
            run()
            settle()
            taken.append(time.perf_counter() - began)
        medians.append(sorted(taken)[len(taken) // 2])
    return min(medians)
