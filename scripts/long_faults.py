"""The places at which a small run may fail, load to saved context, each made to fail once.

The long version of tests/core/test_faults_everywhere.py: each allocation of device and host
memory, each result of an operation, copy, wait, write and collective in turn. A run must end in a
typed error or give the same tokens, and the next one be right, with nothing left behind. Of a kind
that has more places than `--each`, as operations do, so many are drawn, but for the first case
with `--whole`.

    python scripts/long_faults.py [--each 500] [--collectives 20] [--whole]

Writes benchmarks/results/long_faults.json, or long_faults_sample.json without `--whole`, and exits
with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from results import write_result

TESTS = Path(__file__).parent.parent / "tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--each", type=int, default=500, help="places of a kind that are tried, of thousands"
    )
    parser.add_argument("--collectives", type=int, default=20, help="that are tried: seconds each")
    parser.add_argument("--whole", action="store_true", help="all places of the first case")
    args = parser.parse_args()
    sys.path.append(str(TESTS))
    torch.set_num_threads(1)
    from fault_points import KINDS
    from fault_runs import CASES, Runs
    from helpers import make_model

    most = dict.fromkeys(KINDS, args.each) | {"collective": args.collectives}
    figures, faults = {}, []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        make_model("llama", Path(folder, "model"))
        for number, case in enumerate(CASES):
            written = Path(folder, str(number))
            written.mkdir()
            runs = Runs(Path(folder, "model"), case, written)
            every = args.whole and not number
            figures[case] = try_all(runs, case, runs.counts if every else most, faults)
            print(f"{case}: {figures[case]}", flush=True)
    name = "long_faults" if args.whole else "long_faults_sample"
    path = write_result(name, {"cases": figures, "faults": faults})
    print(f"{len(faults)} faults; written to {os.path.relpath(path)}")
    return 1 if faults else 0


def try_all(runs: Any, case: str, most: dict[str, int], faults: list[str]) -> dict[str, Any]:
    """What came of a fault of each kind. faults: gets what should not have."""
    from fault_points import KINDS

    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    began, choose = time.perf_counter(), random.Random(0)
    # Of ranks only what is theirs: everything else costs seconds a place and is the other cases'.
    for kind in ["collective"] if runs.counts["collective"] else KINDS:
        places = runs.places(kind)
        for _, at in choose.sample(places, min(len(places), most[kind])):
            try:
                outcomes[kind][runs.fail_at(kind, at)] += 1
            except Exception as error:
                faults.append(f"{case}: {kind} {at}: {type(error).__name__}: {error}"[:300])
                print(f"FAULT {faults[-1]}", flush=True)
    return {
        "places": dict(runs.counts),
        "outcomes": {kind: dict(found) for kind, found in outcomes.items()},
        "seconds": round(time.perf_counter() - began),
    }


if __name__ == "__main__":
    sys.exit(main())
