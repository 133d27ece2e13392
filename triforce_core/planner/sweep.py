"""The same case over several contexts, links or numbers of GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.errors import DoesNotFitError, UsageError
from offload.machine.profiles import Hardware, with_link
from triforce_core.planner.candidates import Case
from triforce_core.planner.prediction import predict
from triforce_core.planner.search import choose

LINKS = ("pcie3x8", "pcie3x16", "pcie4x8", "pcie4x16", "pcie5x8", "pcie5x16")
_LEAST_CONTEXT = 4096


def sweep(case: Case, kind: str) -> list[dict[str, Any]]:
    """One row for each value; a case that does not fit has a `refused` instead of figures."""
    return [_row(one) for one in _cases(case, kind)]


def plot(rows: list[dict[str, Any]], kind: str, model: str, path: Path) -> None:
    """Seconds per token, a line for each number of GPUs. Raises UsageError."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
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
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the plot to {path}: {error}") from error


def _cases(case: Case, kind: str) -> list[Case]:
    if kind == "gpus":
        return [replace(case, hardware=_gpus(case.hardware, gpus)) for gpus in (1, 2)]
    if kind == "link":
        return [replace(case, hardware=_in_slot(case.hardware, link)) for link in LINKS]
    contexts = []
    size = _LEAST_CONTEXT
    while size <= case.config.positions:
        contexts.append(size)
        size *= 2
    return [
        replace(
            case,
            context=context,
            new_tokens=min(case.new_tokens, context - 1),
            hardware=_gpus(case.hardware, gpus),
        )
        for gpus in (1, 2)
        for context in contexts or [case.config.positions]
    ]


def _gpus(hardware: Hardware, gpus: int) -> Hardware:
    return replace(hardware, gpus=gpus)


def _in_slot(hardware: Hardware, link: str) -> Hardware:
    """The card as if it could use all of the slot."""
    return with_link(replace(hardware, link=link), link)


def _row(case: Case) -> dict[str, Any]:
    hardware = case.hardware
    row: dict[str, Any] = {
        "gpu": hardware.name,
        "gpus": hardware.gpus,
        "link": hardware.link,
        "context": case.context,
    }
    try:
        chosen = choose(case)
    except (DoesNotFitError, UsageError) as error:
        return row | {"refused": str(error)}
    prediction = predict(chosen)
    return row | {
        "method": chosen.plan.method,
        "budget": chosen.plan.budget,
        "draft_tokens": chosen.plan.draft_tokens,
        **{
            name: getattr(prediction, name)
            for name in (
                "seconds_per_token",
                "seconds_per_pass",
                "draft_seconds",
                "tokens_per_pass",
                "bytes_per_pass",
                "floor_seconds_per_pass",
                "seconds_to_first_token",
            )
        },
    }
