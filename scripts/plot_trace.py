"""Draws a trace as a picture: one row a stream, one bar an event.

python scripts/plot_trace.py TRACE.json PICTURE.png [--begin SECONDS] [--end SECONDS]

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("plot_trace.py needs matplotlib: pip install matplotlib")
from trace_file import read_trace

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

from offload.files import Output
from triforce_core.cli.plot import picture

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--begin", type=float, default=0.0, help="seconds")
    parser.add_argument("--end", type=float, default=float("inf"), help="seconds")
    args = parser.parse_args()
    try:
        tracks = read_trace(args.trace)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"cannot read a trace from {args.trace}: {error}")
    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.4 * len(tracks)))
    seen = set()
    for row, events in enumerate(tracks.values()):
        shown = [e for e in events if e.ended >= args.begin and e.began <= args.end]
        # What is nested is drawn last, over what holds it.
        for event in sorted(shown, key=lambda event: -event.seconds):
            seen.add(event.name)
            color = _COLORS.get(event.name, "#999999")
            high = 0.5 if event.name == "wait" else 0.8
            axes.barh(row, event.seconds, high, event.began, color=color, edgecolor="white", lw=0.2)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    if args.end < float("inf"):
        axes.set_xlim(args.begin, args.end)
    handles = [Patch(color=_COLORS.get(name, "#999999"), label=name) for name in sorted(seen)]
    axes.legend(
        handles=handles,
        ncol=len(handles),
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.15),
    )
    figure.tight_layout()
    Output(args.picture, "picture").write(picture(figure, args.picture, dpi=130))


if __name__ == "__main__":
    main()
