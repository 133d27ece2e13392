"""The report of a comparison: a table, a record and a picture."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frame import Figures, print_table
from rivals.job import Outcome
from rivals.systems import ABLATION, GROUPS, MEMORY, OFFLOADED, System


@dataclass(frozen=True)
class Comparison:
    """The settings and outcomes of a comparison.

    settings: the settings that all systems share
    memory: the rates of host memory (`memory_rates`)
    systems, outcomes: by name, in the order of the table
    """

    settings: Figures
    memory: dict[str, float]
    systems: dict[str, System]
    outcomes: dict[str, list[Outcome]]

    def of_group(self, group: str) -> list[str]:
        return [name for name, system in self.systems.items() if system.group == group]

    def values(self, name: str, what: str = "token_seconds") -> list[float]:
        """Return a figure of each timed text that has it."""
        values = [getattr(o, what) for o in self.outcomes[name] if o.token_seconds is not None]
        return [value for value in values if value is not None]

    def median(self, name: str, what: str = "token_seconds") -> float | None:
        values = self.values(name, what)
        return statistics.median(values) if values else None

    def floor(self, group: str) -> float | None:
        """Return the lower bound in seconds for a pass of one token.

        It is the time to read everything once, or to move what the device's memory cannot hold.
        None if the rates were not measured.
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
        """Return whether a system's text equals the reference."""
        timed = [each for each in self.outcomes[name] if each.token_seconds is not None]
        if self.settings["temperature"] or not timed:
            return "drawn"
        found = [each.notes.get("difference", "?") for each in timed]
        if timed[0].tokens is None or "?" in found:
            return "?"
        first = next(filter(None, found), None)
        return f"differs at {first['token']}, gap {first['logit_gap']:.2g}" if first else "equal"

    def record(self) -> Figures:
        return {
            **self.settings,
            "host_memory": self.memory,
            "floors": {group: self.floor(group) for group in GROUPS},
            "systems": {
                name: {
                    "group": system.group,
                    "lossless": system.lossless,
                    "refusal": self.refusal(name),
                    "median_token_seconds": self.median(name),
                    "median_first_seconds": self.median(name, "first_seconds"),
                    "text": self.text(name),
                    "repeats": [_without_tokens(each) for each in self.outcomes[name]],
                }
                for name, system in self.systems.items()
            },
        }


def _without_tokens(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in asdict(outcome).items() if name != "tokens"}


def print_comparison(comparison: Comparison) -> None:
    for group, meaning in GROUPS.items():
        names = comparison.of_group(group)
        if not names:
            continue
        floor = comparison.floor(group)
        print(meaning + (f"; floor of a pass {floor:.4f} s" if floor else ""))
        rows = {name: _cells(comparison, name) for name in names}
        print_table("system", rows, list(rows[names[0]]))
        for name in names:
            if refusal := comparison.refusal(name):
                print(f"{name}: {refusal}")


def _cells(comparison: Comparison, name: str) -> dict[str, str]:
    def megabytes(what: str, decimals: int = 0) -> str:
        count = comparison.median(name, what)
        return "" if count is None else f"{count / 1e6:.{decimals}f}"

    median, seconds = comparison.median(name), comparison.values(name)
    ran = median is not None
    return {
        "tokens/s": f"{1 / median:.2f}" if ran else "did not run",
        "s/token": f"{median:.4f}" if ran else "",
        "least to most": f"{min(seconds):.4f} to {max(seconds):.4f}" if ran else "",
        "first token, s": f"{comparison.median(name, 'first_seconds'):.2f}" if ran else "",
        "device MB": megabytes("device_bytes"),
        "host MB": megabytes("host_bytes"),
        "MB/token": megabytes("moved_bytes", 1),
        "fp32 greedy text": comparison.text(name) if ran else "",
    }


def plot(comparison: Comparison, path: Path) -> None:
    """Draw seconds per token of each system, and the floor of each group."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = {
        group: [name for name in comparison.of_group(group) if comparison.values(name)]
        for group in (MEMORY, OFFLOADED, ABLATION)
    }
    groups = {group: names for group, names in groups.items() if names}
    if not groups:
        return
    figure, axes = plt.subplots(
        len(groups),
        figsize=(9, 1.2 + 0.36 * sum(len(names) + 2 for names in groups.values())),
        height_ratios=[len(names) for names in groups.values()],
        squeeze=False,
        layout="constrained",
    )
    for axis, (group, names) in zip(axes[:, 0], groups.items(), strict=True):
        colors = ["#c44e52" if name.startswith(("ours", "+")) else "#8899aa" for name in names]
        axis.barh(names, [comparison.median(name) for name in names], color=colors)
        for i, name in enumerate(names):
            each = comparison.values(name)
            axis.plot([min(each), max(each)], [i, i], color="black", linewidth=1)
            axis.text(max(each), i, f" {comparison.median(name):.3f}", va="center", fontsize=8)
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
        "{model}, {prompt_tokens} + {new_tokens} tokens, {dtype}; link {link}".format_map(settings),
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
