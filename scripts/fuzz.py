"""Damaged files of every kind that is read: checkpoints and what people keep beside them.

The long version of tests/core/model/test_corrupt.py and tests/core/test_damaged_files.py. A mutant
is read or refused with a typed error; what loads of a checkpoint must generate. None may crash the
process; of a checkpoint none may take 2 s of processor time, or 200 MB and three times its size.

    python scripts/fuzz.py [--count 100000] [--of-checkpoints N] [--only NAME ...]

Writes benchmarks/results/fuzz.json, of some names fuzz_NAME_NAME.json, and exits with 1 if anything
was found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from results import write_result

TESTS = Path(__file__).parent.parent / "tests"


def main() -> int:
    sys.path.append(str(TESTS))
    # Of the processes that it starts.
    os.environ |= {"PYTHONPATH": str(TESTS), "HF_HUB_OFFLINE": "1"}
    import kept_files
    import mutants

    names = [*mutants.TARGETS, *kept_files.KEPT]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=100_000, help="mutants of each file")
    parser.add_argument("--of-checkpoints", type=int, help="of each file of one (default: as many)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    args = parser.parse_args()
    figures, faults = {}, []
    with tempfile.TemporaryDirectory() as folder:
        mutants.make_sound(Path(folder, "sound"))
        for name in args.only:
            began = time.perf_counter()
            try_, count = of_kept, args.count
            if name in mutants.TARGETS:
                try_, count = of_checkpoint, args.of_checkpoints or args.count
            found = {"mutants": count, **try_(name, Path(folder), count)}
            seconds = time.perf_counter() - began
            found["milliseconds_a_mutant"] = round(1000 * seconds / count, 2)
            faults += found.pop("faults")
            figures[name] = found
            print(f"{name}: {found}", flush=True)
    some = [] if set(args.only) == set(names) else args.only
    path = write_result("_".join(["fuzz", *some]), {"files": figures, "faults": faults})
    print("\n".join([*faults, f"{len(faults)} faults; written to {os.path.relpath(path)}"]))
    return 1 if faults else 0


def of_checkpoint(name: str, folder: Path, count: int) -> dict[str, Any]:
    import mutants

    # Left damaged by the kind before.
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
        return {"taken": None, "refused": None, "faults": faults}
    _, taken, refused = lines[-1].split()
    return {"taken": int(taken), "refused": int(refused), "faults": faults}


def of_kept(name: str, folder: Path, count: int) -> dict[str, Any]:
    import kept_files

    own = folder / name
    own.mkdir()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        run = pool.submit(kept_files.try_mutants, name, folder / "sound" / "hf", own, 0, count)
        try:
            found = run.result()
        except BrokenProcessPool:
            return {"taken": None, "refused": None, "faults": [f"{name}: the process was ended"]}
    return {"taken": found.taken, "refused": found.refused, "faults": found.faults}


if __name__ == "__main__":
    sys.exit(main())
