"""F1: run random schedules of the conveyor on simulated streams that an adversary interleaves.

This is the long version of tests/offload/test_conveyor.py.

    python scripts/checks long_checks [--schedules 100000]

Writes benchmarks/results/long_checks.json. Exits with 1 if a schedule is faulty.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from checks.tests_folder import use_tests
from frame import Benchmark, Figures, Option


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    use_tests("offload")
    from test_conveyor import is_faulty

    began = time.perf_counter()
    faults = [seed for seed in range(args.schedules) if is_faulty(seed)]
    seconds = round(time.perf_counter() - began)
    yield {"F1": {"schedules": args.schedules, "faults": faults, "seconds": seconds}}


main = Benchmark(
    __doc__, "long_checks", measure, (Option("--schedules", 100_000, "number of schedules"),)
)
