"""F6: make each place at which a small run can fail, from loading to saving, fail once.

This is the long version of tests/core/test_faults_everywhere.py. The places are each allocation of
device and host memory, and each result of an operation, copy, wait, write and collective. A run
must end with a typed error or give the same tokens; the next run must be correct, with nothing left
behind. If a kind has more places than `--each`, as operations do, a sample of that size is tested;
`--whole` tests all places of the first case.

    python scripts/checks long_faults [--each 500] [--collectives 20] [--whole]

Writes benchmarks/results/long_faults.json, or long_faults_sample.json without `--whole`. Exits with
1 if a run broke one of these rules.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checks.tests_folder import use_tests
from frame import Benchmark, Figures, Option


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    use_tests()
    torch.set_num_threads(1)
    from fault_points import KINDS
    from fault_runs import CASES, Runs, family
    from helpers import make_model

    yield {"cases": {}, "faults": []}
    most = dict.fromkeys(KINDS, args.each) | {"collective": args.collectives}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        for number, case in enumerate(CASES):
            model = Path(folder, family(case))
            if not model.exists():
                make_model(family(case), model)
            written = Path(folder, str(number))
            written.mkdir()
            runs = Runs(model, case, written)
            every = args.whole and not number
            row, faults = try_all(runs, runs.counts if every else most)
            yield {"cases": {case: row}, "faults": [f"{case}: {fault}" for fault in faults]}


def try_all(runs: Any, most: dict[str, int]) -> tuple[Figures, list[str]]:
    """Return the outcomes of failures of each kind, and the outcomes that are faults."""
    from fault_points import KINDS

    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    faults: list[str] = []
    began, choose = time.perf_counter(), random.Random(0)
    # With several ranks only collectives are tested: each place costs seconds, and the other cases
    # cover the other kinds.
    for kind in ["collective"] if runs.counts["collective"] else KINDS:
        places = runs.places(kind)
        for _, at in choose.sample(places, min(len(places), most[kind])):
            try:
                outcomes[kind][runs.fail_at(kind, at)] += 1
            except Exception as error:
                faults.append(f"{kind} {at}: {type(error).__name__}: {error}"[:300])
                print(f"FAULT {faults[-1]}", file=sys.stderr, flush=True)
    row = {
        "places": dict(runs.counts),
        "outcomes": {kind: dict(found) for kind, found in outcomes.items()},
        "seconds": round(time.perf_counter() - began),
    }
    return row, faults


main = Benchmark(
    __doc__,
    lambda args: "long_faults" if args.whole else "long_faults_sample",
    measure,
    (
        Option("--each", 500, "places of each kind that are tried"),
        Option("--collectives", 20, "collectives that are tried; each takes seconds"),
        Option("--whole", False, "all places of the first case"),
    ),
)
