"""Read damaged files of every kind: checkpoints and the files that users keep beside them.

This is the long version of tests/core/model/test_corrupt.py and tests/core/test_damaged_files.py. A
mutant must be read, or rejected with a typed error; a checkpoint that loads must generate. No
mutant may crash the process. No mutant of a checkpoint may take more than 2 s of processor time, or
more memory than 200 MB and three times its size.

    python scripts/checks fuzz [--count 100000] [--of-checkpoints N] [--only NAME ...]

Writes benchmarks/results/fuzz.json, or fuzz_NAME_NAME.json with --only. Exits with 1 if a mutant
broke one of these rules.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from checks.tests_folder import use_tests
from frame import Benchmark, Figures, Option


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    use_tests()
    # For the processes that this one starts.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import kept_files
    import mutants

    names = [*mutants.TARGETS, *kept_files.KEPT]
    if unknown := set(args.only) - set(names):
        sys.exit(f"--only {', '.join(unknown)}: choose from {', '.join(names)}")
    yield {"files": {}, "faults": []}
    with tempfile.TemporaryDirectory() as folder:
        mutants.make_sound(Path(folder, "sound"))
        for name in args.only or names:
            began = time.perf_counter()
            try_, count = of_kept, args.count
            if name in mutants.TARGETS:
                try_, count = of_checkpoint, args.of_checkpoints or args.count
            found, faults = try_(name, Path(folder), count)
            milliseconds = 1000 * (time.perf_counter() - began) / count
            row = {"mutants": count, **found, "milliseconds_a_mutant": round(milliseconds, 2)}
            yield {"files": {name: row}, "faults": faults}


def of_checkpoint(name: str, folder: Path, count: int) -> tuple[Figures, list[str]]:
    import mutants

    # The mutants of the previous kind have damaged it.
    root = folder / name
    mutants.make_sound(root)
    process = subprocess.run(
        [sys.executable, mutants.__file__, str(root), name, "0", str(count)],
        capture_output=True,
        text=True,
    )
    lines = process.stdout.splitlines()
    faults = [line for line in lines if line.startswith("FAULT")]
    if process.returncode:
        faults.append(f"{name}: the process ended with {process.returncode}")
        return {"taken": None, "refused": None}, faults
    _, taken, refused = lines[-1].split()
    return {"taken": int(taken), "refused": int(refused)}, faults


def of_kept(name: str, folder: Path, count: int) -> tuple[Figures, list[str]]:
    import kept_files

    own = folder / name
    own.mkdir()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        run = pool.submit(kept_files.try_mutants, name, folder / "sound" / "hf", own, 0, count)
        try:
            found = run.result()
        except BrokenProcessPool:
            return {"taken": None, "refused": None}, [f"{name}: the process was ended"]
    return {"taken": found.taken, "refused": found.refused}, found.faults


main = Benchmark(
    __doc__,
    lambda args: "_".join(["fuzz", *args.only]),
    measure,
    (
        Option("--count", 100_000, "mutants of each file"),
        Option("--of-checkpoints", type=int, help="mutants of each file of a checkpoint (--count)"),
        Option("--only", (), "kinds of files, all if none is named", metavar="NAME"),
    ),
)
