"""How long something takes on a machine that others may use too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Each of the rates is measured in so many windows of so many seconds: others that use the machine
# disturb some of them.
_WINDOWS, _WINDOW_SECONDS = 5, 0.05


def seconds_of(run: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> float:
    """What one run takes: the median of a window, in the best of several, after one that warms
    up.
    """
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
