"""Reading what `--trace` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Event(NamedTuple):
    """began, seconds: from the first event of the file on"""

    name: str
    began: float
    seconds: float
    args: dict[str, Any]

    @property
    def ended(self) -> float:
        return self.began + self.seconds


def read_trace(path: Path) -> dict[str, list[Event]]:
    """The events of each track, in order."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    # A rank is a process of the viewer.
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["pid"], event["tid"]]].append(
                Event(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"])
            )
    return tracks
