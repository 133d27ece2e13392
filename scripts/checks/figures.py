"""Simulated figures in the documents are those that `triforce plan` computes.

Plans again what stands in the tables of docs/planner.md and in the rows of README.md that are
marked "simulated", and prints each figure that differs by more than its rounding.

    python scripts/checks figures [--only WORDS]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache

from checks.planned_tables import Cell, planned, planner_cells
from checks.readme_rows import readme_cells
from frame import Benchmark, Figures, Option


@cache
def cells() -> tuple[Cell, ...]:
    """Return all figures that can be planned again."""
    return (*readme_cells(), *planner_cells())


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    chosen = [cell for cell in cells() if args.only in cell.place]
    yield {"figures": len(chosen)}
    for cell in chosen:
        if difference := cell.difference(planned(cell.arguments)):
            yield {"faults": [f"{cell.place}: {difference}"]}


main = Benchmark(
    __doc__,
    None,
    measure,
    (Option("--only", "", "check only figures whose document, row or column has these words"),),
)
