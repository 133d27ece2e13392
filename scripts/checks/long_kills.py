"""K2: kill runs at random moments, and repeat each of them to its end.

The runs use a tiny model whose KV streams. They write draft copies of its layers, statistics, a
timeline and a saved context; a kill may hit any of these writes. The run after a killed one must
give the same text, and no file of the killed run may remain.

    python scripts/checks long_kills [--count 200]

Writes benchmarks/results/long_kills.json. Exits with 1 if a run left a file behind, or gave another
text.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator

from checks.small_runs import forks, tiny_model
from frame import Benchmark, Figures, Option

# The duration of a fork.
_SECONDS = 0.4


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    choose = random.Random(0)
    moments = [{"killed": choose.uniform(0, _SECONDS)} for _ in range(args.count)]
    with tiny_model() as (folder, model):
        began = time.perf_counter()
        found = forks(model, folder, moments)
        seconds = time.perf_counter() - began
    texts = Counter(run["text"] for run in found)
    usual = texts.most_common(1)[0][0]
    yield {
        "runs": len(found),
        "killed": sum(run["codes"][0] == -9 for run in found),
        "had_ended_before": sum(run["codes"][0] == 0 for run in found),
        "texts": len(texts),
        "faults": [run for run in found if run["wrong"] or run["text"] != usual],
        "seconds": round(seconds),
    }


main = Benchmark(__doc__, "long_kills", measure, (Option("--count", 200, "number of runs"),))
