"""Plots of `triforce plan --sweep`."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_offload.errors import UsageError
from triforce_offload.files import Output

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check() -> None:
    """Raise UsageError if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


def plot(rows: list[dict[str, Any]], kind: str, model: str, path: Path) -> None:
    """Plot seconds per token, with a line for each number of GPUs.

    Raises UsageError or OutputError.
    """
    check()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for gpus in sorted({row["gpus"] for row in rows}):
        shown = [row for row in rows if row["gpus"] == gpus and "seconds_per_token" in row]
        axes.plot(
            [row[kind] if kind == "context" else str(row[kind]) for row in shown],
            [row["seconds_per_token"] for row in shown],
            marker="o",
            label=f"{gpus} GPU{'s' if gpus > 1 else ''}",
        )
    if kind == "context":
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel({"context": "context, tokens", "gpus": "GPUs", "link": "link"}[kind])
    axes.set_ylabel("seconds per token, SIMULATED")
    axes.set_title(f"{model} on {rows[0]['gpu']}", fontsize=10)
    axes.legend()
    figure.tight_layout()
    Output(path, "plot").write(picture(figure, path, dpi=130))


def picture(figure: Figure, path: Path, dpi: int) -> bytes:
    """Return a figure in the format given by the file's suffix, PNG without one.

    Raises UsageError.
    """
    whole = io.BytesIO()
    try:
        figure.savefig(whole, format=path.suffix.removeprefix(".") or "png", dpi=dpi)
    except ValueError as error:
        raise UsageError(f"cannot draw {path}: {error}") from error
    return whole.getvalue()
