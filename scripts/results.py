"""What every benchmark's JSON says of where its figures come from."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from offload.files import Output
from offload.machine.hardware import provenance

DIRECTORY = Path(__file__).parent.parent / "benchmarks" / "results"


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Writes benchmarks/results/NAME.json: date, command, hardware, versions and the figures."""
    path = DIRECTORY / f"{name.removesuffix('.json')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    script = Path(sys.argv[0]).resolve()
    # By its path in the repository, folders included.
    folder = Path(__file__).resolve().parent
    name = script.relative_to(folder) if script.is_relative_to(folder) else script.name
    arguments = [f"scripts/{name}", *sys.argv[1:]]
    record = {
        **provenance(shlex.join(["python", *arguments])),
        **figures,
    }
    Output(path, "result").write(json.dumps(record, indent=2) + "\n")
    return path
