"""Run one job in a separate process: `python -m rivals.worker`, with the job on standard input.

The last line of its standard output is the outcome, after a mark.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rivals.job import Job, Outcome, Refusal

MARK = "OUTCOME "


def work() -> None:
    job = Job.from_json(sys.stdin.read())
    try:
        outcome = importlib.import_module(f"rivals.{job.module}").run(job)
    except Refusal as refusal:
        outcome = Outcome(refusal=str(refusal))
    except ModuleNotFoundError as error:
        outcome = Outcome(refusal=f"the package {error.name} is not installed here")
    outcome.host_bytes = _most_resident_bytes()
    print(f"\n{MARK}{json.dumps(asdict(outcome))}", flush=True)


def _most_resident_bytes() -> int | None:
    """Return the peak of resident memory, or None on systems other than Linux.

    `getrusage` would not do: its peak includes the process that started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    most = next((line for line in lines if line.startswith("VmHWM:")), None)
    return most and int(most.split()[1]) << 10


if __name__ == "__main__":
    work()
