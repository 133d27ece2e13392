"""Runs that are interrupted at random moments: of load, reading, decoding, saving.

The long version of tests/core/cli/test_interrupts.py, on a tiny model whose KV streams. Most runs
are forks of a process that has loaded torch, and are interrupted within their half second; every
tenth is a command of its own, interrupted within its four. Text and stats must be kept, and no part
of a file, no process, no shared memory left.

    python scripts/long_interrupts.py [--count 200]

Writes benchmarks/results/long_interrupts.json and exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from results import write_result

TESTS = Path(__file__).parent.parent / "tests"
# A run of its own takes about so long, most of it imports; a fork.
_COMMAND_SECONDS, _FORK_SECONDS = 4.0, 0.5
_EVERY = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    sys.path.append(str(TESTS))
    from helpers import add_tokenizer, make_model

    choose, own = random.Random(0), args.count // _EVERY
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_model("llama", model)
        add_tokenizer(model)
        began = time.perf_counter()
        found = forks(model, Path(folder), choose, args.count - own)
        found += [command(model, Path(folder, f"own{i}"), choose) for i in range(own)]
        seconds = time.perf_counter() - began
    faults = [run for run in found if run["wrong"]]
    states = Counter(str(run["ended"] or "before its text") for run in found)
    figures = {
        "runs": len(found),
        "commands_of_their_own": own,
        "codes": dict(Counter(str(run["code"]) for run in found)),
        "where_they_were": dict(states),
        "longest_to_end_seconds": max(run["seconds_to_end"] for run in found),
        "faults": faults,
        "seconds": round(seconds),
    }
    path = write_result("long_interrupts", figures)
    print(json.dumps(figures, indent=2))
    print(f"written to {os.path.relpath(path)}")
    return 1 if faults else 0


def forks(model: Path, folder: Path, choose: random.Random, count: int) -> list[dict[str, Any]]:
    import interrupted_runs

    moments = [{"seconds": choose.uniform(0, _FORK_SECONDS)} for _ in range(count)]
    done = subprocess.run(
        [sys.executable, interrupted_runs.__file__, str(model), str(folder)],
        input=json.dumps(moments),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def command(model: Path, folder: Path, choose: random.Random) -> dict[str, Any]:
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


if __name__ == "__main__":
    sys.exit(main())
