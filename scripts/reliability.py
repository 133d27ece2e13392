"""What the long checks found, put together: a row for each, with its date, command and faults.

    python scripts/reliability.py

Reads what the scripts named below wrote, and writes benchmarks/results/reliability.json. Exits with
1 if one found anything, or was not run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from offload.files import Output

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


class Check(NamedTuple):
    """codes: of tests/README.md. result: the file that its script writes. told: the figures in it
    that say how much was tried.
    """

    codes: tuple[str, ...]
    result: str
    told: tuple[str, ...]


CHECKS = (
    Check(("L1", "L2", "L3", "P2"), "long_laws", ("L1", "L1, trees", "L2", "L3")),
    Check(("F1",), "long_checks", ("F1",)),
    Check(("F6",), "long_faults", ("cases",)),
    Check(("Z1",), "fuzz", ("files",)),
    # Since contexts have checksums.
    Check(("Z1", "C2"), "fuzz_context", ("files",)),
    Check(("K1",), "long_interrupts", ("runs", "codes")),
    Check(("K2",), "long_kills", ("runs", "killed")),
    Check(("K4",), "soak", ("minutes", "requests", "resident_bytes_an_hour", "same_tokens")),
    Check(("S1",), "long_server", ("clients", "minutes", "requests")),
)


def main() -> int:
    rows = [row_of(check) for check in CHECKS]
    path = RESULTS / "reliability.json"
    Output(path, "result").write(json.dumps({"checks": rows}, indent=2) + "\n")
    table = Table(title="long checks")
    for column in ("check", "command", "date", "faults"):
        table.add_column(column)
    for row in rows:
        faults = "not run" if row["faults"] is None else str(len(row["faults"]))
        table.add_row(", ".join(row["codes"]), row["command"], row["date"], faults)
    Console().print(table)
    print(f"written to {os.path.relpath(path)}")
    return int(any(row["faults"] is None or row["faults"] for row in rows))


def row_of(check: Check) -> dict[str, Any]:
    row: dict[str, Any] = {"codes": check.codes, "result": f"{check.result}.json"}
    path = RESULTS / row["result"]
    if not path.exists():
        return {**row, "command": "", "date": "", "faults": None}
    found = json.loads(path.read_text("utf-8"))
    return {
        **row,
        **{name: found[name] for name in ("command", "date", "hardware", "versions")},
        "told": {name: found[name] for name in check.told if name in found},
        "faults": faults_of(found),
    }


def faults_of(found: dict[str, Any]) -> list[Any]:
    """Whatever a result says was wrong, wherever in it."""
    faults = [*found.get("faults", ()), *found.get("wrong", ())]
    if found.get("same_tokens") is False or found.get("same_answer") is False:
        faults.append("other tokens at the end")
    if found.get("hung_clients"):
        faults.append(f"{found['hung_clients']} clients hung")
    if "least_p_allowed" in found:
        least = found["least_p_allowed"]
        faults += [
            f"{name}: p {part['least_p']}"
            for name, part in found.items()
            if isinstance(part, dict) and part.get("least_p", 1) < least
        ]
    for part in found.values():
        if isinstance(part, dict):
            faults += part.get("faults", ())
    return faults


if __name__ == "__main__":
    sys.exit(main())
