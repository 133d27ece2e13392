"""K1: interrupt runs at random moments of loading, prefill, decoding and saving.

This is the long version of tests/core/cli/test_interrupts.py. Most runs are forks of a process that
has loaded torch, and are interrupted within their half second; every tenth is a separate command,
interrupted within its four seconds. Text and statistics must be kept, and no partial file, process
or shared memory may remain.

    python scripts/checks long_interrupts [--count 200]

Writes benchmarks/results/long_interrupts.json. Exits with 1 if a run left or lost anything.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from checks.small_runs import forks, tiny_model
from frame import Benchmark, Figures, Option

# The durations of a command, most of which are imports, and of a fork.
_COMMAND_SECONDS, _FORK_SECONDS = 4.0, 0.5
_EVERY = 10


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    choose, own = random.Random(0), args.count // _EVERY
    with tiny_model() as (folder, model):
        began = time.perf_counter()
        moments = [{"seconds": choose.uniform(0, _FORK_SECONDS)} for _ in range(args.count - own)]
        found = forks(model, folder, moments)
        found += [command(model, folder / f"own{i}", choose) for i in range(own)]
        seconds = time.perf_counter() - began
    states = Counter(str(run["ended"] or "before its text") for run in found)
    yield {
        "runs": len(found),
        "commands_of_their_own": own,
        "codes": dict(Counter(str(run["code"]) for run in found)),
        "where_they_were": dict(states),
        "longest_to_end_seconds": max(run["seconds_to_end"] for run in found),
        "faults": [run for run in found if run["wrong"]],
        "seconds": round(seconds),
    }


def command(model: Path, folder: Path, choose: random.Random) -> Figures:
    from command import heed_signals, wait_until_heeded
    from interrupted_runs import arguments, kept

    folder.mkdir()
    moment, wrong = choose.uniform(0, _COMMAND_SECONDS), []
    with open(folder / "text", "wb") as text:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "triforce_core.cli", *arguments(model, folder)],
            stdout=text,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_signals,
        )
    wait_until_heeded(process.pid)
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    began = time.perf_counter()
    _, said = process.communicate(timeout=60)
    seconds = time.perf_counter() - began
    if "Traceback" in said:
        wrong.append(said)
    about = kept(folder, process.returncode, wrong)
    return {"seconds": moment, "code": process.returncode, "seconds_to_end": seconds, **about}


main = Benchmark(__doc__, "long_interrupts", measure, (Option("--count", 200, "number of runs"),))
