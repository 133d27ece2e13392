"""Draw a file from `--trace` as a picture: a row for each stream, a bar for each event.

    python scripts/bench plot_trace TRACE.json PICTURE.png [--begin SECONDS] [--end SECONDS]

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from triforce_core.cli.plan.plot import picture
from triforce_offload.files import Output

_COLORS = {
    "weights": "#8e7cc3",
    "kv": "#3d85c6",
    "retrieval": "#45818e",
    "layer": "#6aa84f",
    "retrieval model": "#93c47d",
    "drafter": "#b6d7a8",
    "wait": "#e06666",
    "draft": "#f6b26b",
    "verify": "#3a7d44",
    "refresh": "#c27ba0",
    "step": "#3a7d44",
}


class Event(NamedTuple):
    """One event of a trace. began: seconds after the first event of the file"""

    name: str
    began: float
    seconds: float
    args: dict[str, Any]

    @property
    def ended(self) -> float:
        return self.began + self.seconds


def read_trace(path: Path) -> dict[str, list[Event]]:
    """Return the events of each track, in order."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    # Each rank is a separate process in the viewer.
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["pid"], event["tid"]]].append(
                Event(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"])
            )
    return tracks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--begin", type=float, default=0.0, help="seconds")
    parser.add_argument("--end", type=float, default=inf, help="seconds")
    args = parser.parse_args()
    if not find_spec("matplotlib"):
        sys.exit("plot_trace needs matplotlib: pip install matplotlib")
    try:
        draw(args.trace, args.picture, args.begin, args.end)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"cannot read a trace from {args.trace}: {error}")


def draw(trace: Path, path: Path, begin: float, end: float) -> None:
    """Draw the events between two moments.

    begin, end: seconds after the first event of the file
    Raises OSError, ValueError or KeyError for a file that is not a trace.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    tracks = read_trace(trace)
    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.4 * len(tracks)))
    seen = set()
    for row, events in enumerate(tracks.values()):
        shown = [e for e in events if e.ended >= begin and e.began <= end]
        # Draw short events last, over the events that contain them.
        for event in sorted(shown, key=lambda event: -event.seconds):
            seen.add(event.name)
            color = _COLORS.get(event.name, "#999999")
            high = 0.5 if event.name == "wait" else 0.8
            axes.barh(row, event.seconds, high, event.began, color=color, edgecolor="white", lw=0.2)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    if end < inf:
        axes.set_xlim(begin, end)
    handles = [Patch(color=_COLORS.get(name, "#999999"), label=name) for name in sorted(seen)]
    axes.legend(
        handles=handles,
        ncol=len(handles),
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.15),
    )
    figure.tight_layout()
    Output(path, "picture").write(picture(figure, path, dpi=130))
