"""The measurements of a comparison so far, in a file from which it resumes after an interrupt."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rivals.job import Outcome
from rivals.memory_rates import memory_rates


class Answers:
    """Lines of JSON: the rates of the memory first, then an outcome for each generated text."""

    def __init__(self, path: Path, *, afresh: bool) -> None:
        self._path = path
        if afresh:
            path.unlink(missing_ok=True)
        elif path.exists():
            # An interrupt may have left an incomplete last line.
            whole, newline, _ = path.read_text().rpartition("\n")
            path.write_text(whole + newline)

    def rates(self, threads: int) -> dict[str, float]:
        """Return the memory's rates, measured once: a resumed comparison has the same link."""
        for line in self._lines():
            if "rates" in line:
                return line["rates"]
        rates = memory_rates(threads)
        self._append({"rates": rates})
        return rates

    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        """Return the outcomes by system and repeat, except refusals, which are run again."""
        return {
            (line["system"], line["repeat"]): Outcome.from_dict(line)
            for line in self._lines()
            if "system" in line and not line["refusal"]
        }

    def add(self, system: str, repeat: int, outcome: Outcome) -> None:
        self._append({"system": system, "repeat": repeat, **asdict(outcome)})

    def close(self) -> None:
        """Finish the comparison, so that the same command measures everything again."""
        self._path.replace(self._path.with_suffix(".done"))

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
