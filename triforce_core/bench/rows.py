"""One figure of `triforce bench`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure. Its rate is amount / seconds.

    floor_seconds: the least time that the hardware allows
    """

    test: str
    what: str
    seconds: tuple[float, ...]
    amount: float
    unit: str
    floor_seconds: float | None = None
    floor: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "test": self.test,
            "what": self.what,
            "median_seconds": self.median,
            "rate": self.amount / self.median,
            "rate_unit": self.unit,
            "floor": self.floor or None,
            "floor_seconds": self.floor_seconds,
            "ratio_to_floor": self.floor_seconds and self.median / self.floor_seconds,
            "seconds": list(self.seconds),
        }
