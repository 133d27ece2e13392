"""K2: runs that are killed at random moments, each followed by the same run to its end.

On a tiny model whose KV streams, with copies of its layers on disk, stats, a timeline and a saved
context, all of which the killed run may have been writing. The run after it must give the same
text, and nothing of the first may be left.

    python scripts/long_kills.py [--count 200]

Writes benchmarks/results/long_kills.json and exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from results import write_result

TESTS = Path(__file__).parent.parent / "tests"
# A run of a fork takes about so long.
_SECONDS = 0.4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    sys.path.append(str(TESTS))
    import interrupted_runs
    from helpers import add_tokenizer, make_model

    choose = random.Random(0)
    moments = [{"killed": choose.uniform(0, _SECONDS)} for _ in range(args.count)]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_model("llama", model)
        add_tokenizer(model)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, interrupted_runs.__file__, str(model), folder],
            input=json.dumps(moments),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
            check=True,
        )
        seconds = time.perf_counter() - began
    found = [json.loads(line) for line in done.stdout.splitlines()]
    texts = Counter(run["text"] for run in found)
    faults = [run for run in found if run["wrong"] or run["text"] != texts.most_common(1)[0][0]]
    figures = {
        "runs": len(found),
        "killed": sum(run["codes"][0] == -9 for run in found),
        "had_ended_before": sum(run["codes"][0] == 0 for run in found),
        "texts": len(texts),
        "faults": faults,
        "seconds": round(seconds),
    }
    path = write_result("long_kills", figures)
    print(json.dumps(figures, indent=2))
    print(f"written to {os.path.relpath(path)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
