"""Check that the demo takes at most three times its quiet time beside busy processes.

Its text must be the same each time. The runs take turns: quiet, beside one busy process, beside
two. Nothing else should run meanwhile; the load average at the start is recorded.

    python scripts/checks demo_under_load [--runs 5]

Writes benchmarks/results/demo_under_load.json. Exits with 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from frame import ROOT, Benchmark, Figures, Option

# The numbers of busy processes beside the demo.
LOADS = (0, 1, 2)
# The bound for each run, as a multiple of the median quiet time.
MOST_TIMES = 3.0
DEMO = (sys.executable, str(ROOT / "scripts" / "demo.py"))


@dataclass(frozen=True)
class Run:
    """One run of a command. seconds: its duration"""

    seconds: float
    text: str


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {"load_average_at_start": os.getloadavg()}
    runs: dict[int, list[Run]] = {load: [] for load in LOADS}
    for number in range(args.runs):
        for load in LOADS:
            run = timed(DEMO, load)
            runs[load].append(run)
            said = f"run {number + 1}, {load} busy processes: {run.seconds:.1f} s"
            print(said, file=sys.stderr, flush=True)
    yield compared(runs)


def timed(command: Sequence[str], load: int) -> Run:
    """Run a command beside `load` busy processes. Raises CalledProcessError if it fails."""
    with busy_processes(load):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return Run(time.perf_counter() - began, done.stdout)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that each keep a processor busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compared(runs: dict[int, list[Run]]) -> Figures:
    """Return the medians, and whether the bounds hold.

    runs: the runs by number of busy processes
    """
    quiet = statistics.median(run.seconds for run in runs[0])
    texts = {run.text for each in runs.values() for run in each}
    worst = max(run.seconds for each in runs.values() for run in each) / quiet
    return {
        "busy_processes": {
            str(load): {
                "seconds": [run.seconds for run in each],
                "median_seconds": statistics.median(run.seconds for run in each),
                "median_times_quiet": statistics.median(run.seconds for run in each) / quiet,
            }
            for load, each in runs.items()
        },
        "worst_times_quiet": worst,
        "most_times_quiet": MOST_TIMES,
        "same_text": len(texts) == 1,
        "text": sorted(texts)[0],
        "holds": worst <= MOST_TIMES and len(texts) == 1,
    }


main = Benchmark(
    __doc__,
    "demo_under_load",
    measure,
    (Option("--runs", 5, "runs of the demo beside each number of busy processes"),),
)
