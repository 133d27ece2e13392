"""Trees of the retrieval level beside its chains over an EMULATED link, SmolLM2-135M in float32.

The KV cache streams, and a pass over the link takes 30, 100 or more times as long as a step of the
retrieval level. Trees and chains get the same prompts and the same placement in the same run, and
with `coupled` acceptance the same texts. With `optimal` acceptance `--tree auto` drafts chains.

    python scripts/bench retrieval_trees [--ratios 100 30]

Writes benchmarks/results/bench_retrieval_trees.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bench.paced import PacedBench, workload
from bench.placements import KV_STREAMED
from bench.workloads import stretches
from frame import Benchmark, Figures, Option

KINDS = {"chains": {"tree": "off"}, "trees": {}}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    bench = PacedBench(
        stretches(args.prompts, args.tokens),
        args.new_tokens,
        args.budget,
        {"placement": KV_STREAMED},
    )
    step_seconds, pass_bytes = bench.calibrate(40, draft_tokens=32)
    yield {
        **workload(args, "float32"),
        "new_tokens": args.new_tokens,
        "retrieval_step_seconds": step_seconds,
        "bytes_per_pass": pass_bytes,
    }
    for ratio in args.ratios:
        bandwidth = pass_bytes / (int(ratio) * step_seconds)
        rows = {
            kind: compared(bench.measure(bandwidth, args.new_tokens, accept="coupled", **options))
            for kind, options in KINDS.items()
        }
        yield {f"{ratio}:1, coupled": {**rows, "trees over chains": gains(rows)}}


def compared(row: Figures) -> Figures:
    """Return the figures of all prompts together, and each run."""
    runs = row["runs"]
    seconds = {
        name: sum(run["seconds"][name] for run in runs) / sum(run["passes"] for run in runs)
        for name in ("draft", "verify")
    }
    tokens = sum(run["tokens_per_pass"] * run["passes"] for run in runs)
    return {
        "seconds_per_token": row["seconds_per_token_of_all"],
        "tokens_per_pass": tokens / sum(run["passes"] for run in runs),
        "seconds_per_pass": seconds["verify"],
        "draft_seconds_per_pass": seconds["draft"],
        "runs": runs,
    }


def gains(rows: dict[str, Figures]) -> Figures:
    """Return how many times the tokens per pass, and how many times as fast."""
    chains, trees = rows["chains"], rows["trees"]
    return {
        "tokens_per_pass": trees["tokens_per_pass"] / chains["tokens_per_pass"],
        "speed": chains["seconds_per_token"] / trees["seconds_per_token"],
    }


main = Benchmark(
    __doc__,
    "bench_retrieval_trees",
    measure,
    (
        Option("--tokens", 3000, "tokens of a prompt"),
        Option("--prompts", 3, "number of prompts"),
        Option("--new-tokens", 129, "tokens that are generated after each"),
        Option("--budget", 1024, "tokens of the retrieval cache"),
        Option("--ratios", ("100", "30"), "seconds of a pass over those of a step", nargs="*"),
    ),
)
