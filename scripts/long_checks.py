"""The long version of a check of the test suite.

F1: random schedules of the conveyor on simulated streams that an adversary interleaves. Damaged
files (Z1) are in scripts/fuzz.py.

    python scripts/long_checks.py [--schedules 100000]

Writes benchmarks/results/long_checks.json and exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from results import write_result

TESTS = Path(__file__).parent.parent / "tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--schedules", type=int, default=100_000)
    args = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS / "offload")]
    figures = {"F1": schedules(args.schedules)}
    path = write_result("long_checks", figures)
    print(f"written to {os.path.relpath(path)}")
    return 1 if any(figure["faults"] for figure in figures.values()) else 0


def schedules(count: int) -> dict:
    from test_conveyor import is_faulty

    began = time.perf_counter()
    faults = [seed for seed in range(count) if is_faulty(seed)]
    seconds = time.perf_counter() - began
    print(f"F1: {count} schedules, {len(faults)} faults, {seconds:.0f} s")
    return {"schedules": count, "faults": faults, "seconds": round(seconds)}


if __name__ == "__main__":
    sys.exit(main())
