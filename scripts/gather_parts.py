"""Join the output of the parts of gpu_check.sh: gather_parts.py PARTS RESULT.json MEMORY."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from triforce_offload.files import Output
from triforce_offload.machine.hardware import provenance


def main() -> None:
    parts, result, memory = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    record: dict[str, Any] = {
        **provenance(f"MEMORY={memory} bash scripts/gpu_check.sh"),
        "parts": {},
    }
    for code in sorted(parts.glob("*.code")):
        exit_code, seconds = map(int, code.read_text().split())
        output = code.with_suffix(".out").read_text()
        record["parts"][code.stem] = {
            "exit_code": exit_code,
            "seconds": seconds,
            "output": _parsed(output),
        }
    result.parent.mkdir(parents=True, exist_ok=True)
    Output(result, "result").write(json.dumps(record, indent=2) + "\n")
    print(f"written to {result}")


def _parsed(output: str) -> Any:
    """Return the output as JSON, or its last lines if it is not JSON."""
    try:
        return json.loads(output)
    except ValueError:
        return output.splitlines()[-30:]


if __name__ == "__main__":
    main()
