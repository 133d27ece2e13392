"""What a comparison says: a table, a record and a picture."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rivals.job import Outcome
from rivals.systems import ABLATION, GROUPS, MEMORY, OFFLOADED


@dataclass(frozen=True)
class Comparison:
    """settings: the same for all. memory: rates of the host's (`memory_rates`)
    groups, lossless, outcomes: of each system, in the order of the table
    """

    settings: dict[str, Any]
    memory: dict[str, float]
    groups: dict[str, str]
    lossless: dict[str, bool]
    outcomes: dict[str, list[Outcome]]

    def timed(self, name: str) -> list[Outcome]:
        return [each for each in self.outcomes[name] if each.token_seconds is not None]

    def median(self, name: str, what: str = "token_seconds") -> float | None:
        values = [getattr(each, what) for each in self.timed(name)]
        values = [value for value in values if value is not None]
        return statistics.median(values) if values else None

    def floor(self, group: str) -> float | None:
        """Seconds of a pass of one token that nothing undercuts: reading all once, or carrying what
        the device's memory does not hold. None where nobody measured it.
        """
        stored = self.settings["weights_and_kv_bytes"]
        if self.settings["device"] != "cpu":
            return None
        if group == MEMORY:
            return stored / self.memory["read_bytes_per_second"]
        if group == OFFLOADED:
            beyond = max(0, stored - self.settings["device_memory_bytes"])
            return beyond / self.settings["link_bytes_per_second"]
        return None

    def refusal(self, name: str) -> str | None:
        return next((each.refusal for each in self.outcomes[name] if each.refusal), None)

    def text(self, name: str) -> str:
        """Whether a system's text is the reference's."""
        timed = self.timed(name)
        if self.settings["temperature"] or not timed:
            return "drawn"
        if timed[0].tokens is None:
            return "?"
        found = [each.notes.get("difference", "?") for each in timed]
        if "?" in found:
            return "?"
        differing = [each for each in found if each]
        if not differing:
            return "equal"
        first = differing[0]
        return f"differs at {first['token']}, gap {first['logit_gap']:.2g}"

    def record(self) -> dict[str, Any]:
        return {
            **self.settings,
            "host_memory": self.memory,
            "floors": {group: self.floor(group) for group in GROUPS},
            "systems": {
                name: {
                    "group": self.groups[name],
                    "lossless": self.lossless[name],
                    "refusal": self.refusal(name),
                    "median_token_seconds": self.median(name),
                    "median_first_seconds": self.median(name, "first_seconds"),
                    "text": self.text(name),
                    "repeats": [_without_tokens(each) for each in self.outcomes[name]],
                }
                for name in self.outcomes
            },
        }


def _without_tokens(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in asdict(outcome).items() if name != "tokens"}


def print_comparison(comparison: Comparison) -> None:
    console = Console(width=None if Console().is_terminal else 150)
    for group, meaning in GROUPS.items():
        names = [name for name in comparison.outcomes if comparison.groups[name] == group]
        if not names:
            continue
        floor = comparison.floor(group)
        title = meaning + (f"; floor of a pass {floor:.4f} s" if floor else "")
        table = Table(
            *("system", "tokens/s", "s/token", "least to most", "first token, s"),
            *("device", "host", "MB/token", "fp32 greedy text"),
            title=title,
            title_justify="left",
        )
        for name in names:
            table.add_row(name, *_cells(comparison, name))
        console.print(table)
        for name in names:
            if refusal := comparison.refusal(name):
                console.print(f"{name}: {refusal}", highlight=False)


def _cells(comparison: Comparison, name: str) -> list[str]:
    median = comparison.median(name)
    if median is None:
        return ["did not run"]
    all_seconds = [each.token_seconds for each in comparison.timed(name)]
    moved = comparison.median(name, "moved_bytes")
    return [
        f"{1 / median:.2f}",
        f"{median:.4f}",
        f"{min(all_seconds):.4f} to {max(all_seconds):.4f}",
        f"{comparison.median(name, 'first_seconds'):.2f}",
        _megabytes(comparison.median(name, "device_bytes")),
        _megabytes(comparison.median(name, "host_bytes")),
        "" if moved is None else f"{moved / 1e6:.1f}",
        comparison.text(name),
    ]


def _megabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:.0f} MB"


def plot(comparison: Comparison, path: Path) -> None:
    """Seconds per token of each system, and the floor of each group."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = [
        (group, [n for n in comparison.outcomes if comparison.groups[n] == group
                 and comparison.median(n) is not None])
        for group in (MEMORY, OFFLOADED, ABLATION)
    ]  # fmt: skip
    groups = [(group, names) for group, names in groups if names]
    if not groups:
        return
    figure, axes = plt.subplots(
        len(groups),
        figsize=(9, 1.2 + 0.36 * sum(len(names) + 2 for _, names in groups)),
        height_ratios=[len(names) for _, names in groups],
        squeeze=False,
        layout="constrained",
    )
    for axis, (group, names) in zip(axes[:, 0], groups, strict=True):
        medians = [comparison.median(name) for name in names]
        colors = ["#c44e52" if name.startswith(("ours", "+")) else "#8899aa" for name in names]
        axis.barh(names, medians, color=colors)
        for i, (name, median) in enumerate(zip(names, medians, strict=True)):
            each = [outcome.token_seconds for outcome in comparison.timed(name)]
            axis.plot([min(each), max(each)], [i, i], color="black", linewidth=1)
            axis.text(max(each), i, f" {median:.3f}", va="center", fontsize=8)
        if floor := comparison.floor(group):
            axis.axvline(floor, color="black", linestyle=":", label="floor of a pass of one token")
            axis.legend(fontsize=8, loc="lower right")
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_title(GROUPS[group], fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
    axes[-1, 0].set_xlabel("seconds per token")
    settings = comparison.settings
    figure.suptitle(
        f"{settings['model']}, {settings['prompt_tokens']} + {settings['new_tokens']} tokens, "
        f"{settings['dtype']}; link {settings['link']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
