"""The long versions of two checks of the test suite.

F1: random schedules of the conveyor on simulated streams that an adversary interleaves.
Z1: damaged checkpoints, each of which must load or end in a typed error.

    python scripts/long_checks.py [--schedules 100000] [--mutants 20000]

Writes benchmarks/results/long_checks.json and exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import write_result

TESTS = Path(__file__).parent.parent / "tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--mutants", type=int, default=20_000)
    args = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS / "offload")]
    figures = {"F1": schedules(args.schedules), "Z1": damaged(args.mutants)}
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


def damaged(count: int) -> dict:
    import mutants

    each = -(-count // len(mutants.TARGETS))
    loaded, faults = {}, []
    began = time.perf_counter()
    for target in mutants.TARGETS:
        with tempfile.TemporaryDirectory() as root:
            mutants.make_sound(Path(root))
            process = subprocess.run(
                [sys.executable, mutants.__file__, root, target, "0", str(each)],
                capture_output=True,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        lines = process.stdout.splitlines()
        faults += [line for line in lines if line.startswith("FAULT")]
        if process.returncode:
            faults.append(f"{target}: the process ended with {process.returncode}")
        else:
            loaded[target] = int(lines[-1].split()[1])
        print(f"Z1: {each} mutants of {target}, {loaded.get(target)} loaded")
    return {
        "mutants": each * len(mutants.TARGETS),
        "of_each_file": each,
        "loaded": loaded,
        "faults": faults,
        "seconds": round(time.perf_counter() - began),
    }


if __name__ == "__main__":
    sys.exit(main())
