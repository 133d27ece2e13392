"""Collect the results of the long checks in one table, with their dates, commands and faults.

    python scripts/checks reliability

Reads the results of the scripts named below, and writes benchmarks/results/reliability.json. Exits
with 1 if a check has faults, or was not run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import NamedTuple

from frame import Benchmark, Figures, faults_of, result_path


class Check(NamedTuple):
    """One long check.

    codes: its codes in tests/README.md
    result: the name of its result
    told: the figures in the result that show how much was tested
    """

    codes: tuple[str, ...]
    result: str
    told: tuple[str, ...]


CHECKS = (
    Check(("L1", "L2", "L3", "P2"), "long_laws", ("L1", "L1, trees", "L2", "L3")),
    Check(("F1",), "long_checks", ("F1",)),
    Check(("F6",), "long_faults", ("cases",)),
    Check(("Z1",), "fuzz", ("files",)),
    # A separate result, because checksums were added to contexts later.
    Check(("Z1", "C2"), "fuzz_context", ("files",)),
    Check(("K1",), "long_interrupts", ("runs", "codes")),
    Check(("K2",), "long_kills", ("runs", "killed")),
    Check(("K4",), "soak", ("minutes", "requests", "resident_bytes_an_hour", "same_tokens")),
    Check(("S1",), "long_server", ("clients", "minutes", "requests")),
)


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    rows = [row_of(check) for check in CHECKS]
    found = [row["result"] for row in rows if row["faults"] or row["faults"] is None]
    yield {"checks": rows, "faults": found}


def row_of(check: Check) -> Figures:
    row: Figures = {"codes": check.codes, "result": f"{check.result}.json"}
    path = result_path(check.result)
    if not path.exists():
        return {**row, "command": "", "date": "", "faults": None}
    found = json.loads(path.read_text("utf-8"))
    return {
        **row,
        **{name: found[name] for name in ("command", "date", "hardware", "versions")},
        "told": {name: found[name] for name in check.told if name in found},
        "faults": faults_of(found),
    }


main = Benchmark(__doc__, "reliability", measure)
