"""Appending to a context: SmolLM2-135M, 1,000 new tokens of the Python manual after 6,000.

A prompt that begins as the text at hand reads only what is new in it. Its seconds to the first
token are held against those of the whole prompt read afresh, in turns in the same run; so are those
of a prompt that is asked again as it was, and the greedy tokens that follow. Float32.

1. Everything resident.
2. KV streamed over an EMULATED link.

    python scripts/bench_append.py [--kept 6000] [--new 1000] [--repeats 5]

Prints a table and writes benchmarks/results/bench_append.json. Exits with 1 if a text differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from material import model_file, stretches
from results import write_result
from rich.console import Console
from rich.table import Table

from offload.placement import Placement
from triforce_core import Completion, Engine, SamplingParams

PLACEMENTS = {
    "resident": (Placement((), True, 10**9, 0, 0, 0), None),
    "KV streamed, EMULATED link": (Placement((), True, 0, 0, 3, 2), 0.5e9),
}
FOLLOWING = SamplingParams(16, temperature=0)
ONE = SamplingParams(1, temperature=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kept", type=int, default=6000, help="tokens of the context at hand")
    parser.add_argument("--new", type=int, default=1000, help="tokens that are appended to it")
    parser.add_argument("--repeats", type=int, default=5, help="of each, in turns")
    args = parser.parse_args()
    figures = {
        name: measure(args, placement, bandwidth)
        for name, (placement, bandwidth) in PLACEMENTS.items()
    }
    path = write_result(
        "bench_append",
        {
            "model": "SmolLM2-135M-Instruct.Q4_1 as float32",
            "kept_tokens": args.kept,
            "new_tokens": args.new,
            "placements": figures,
        },
    )
    print_table(figures)
    print(f"written to {os.path.relpath(path)}")
    return 0 if all(figure["same_tokens"] for figure in figures.values()) else 1


def measure(
    args: argparse.Namespace, placement: Placement, bandwidth: float | None
) -> dict[str, Any]:
    """Seconds to the first token: of the whole prompt, of what is new in it, and of nothing new."""
    seconds: dict[str, list[float]] = {"afresh": [], "appended": [], "again": []}
    texts: list[list[int]] = []
    length = args.kept + args.new
    with Engine.from_pretrained(
        model_file(),
        device="cpu",
        method="autoregressive",
        max_context=length + FOLLOWING.max_new_tokens,
        placement=placement,
        link_bandwidth=bandwidth,
    ) as engine:
        (prompt,) = stretches(engine.tokenizer, 1, length)
        for _ in range(args.repeats):
            afresh = engine.generate(prompt, FOLLOWING, reuse=False)
            engine.generate(prompt[: args.kept], ONE, reuse=False)
            appended = engine.generate(prompt, FOLLOWING)
            again = engine.generate(prompt, FOLLOWING)
            check_reuse(appended, args.kept)
            check_reuse(again, length - 1)
            for name, result in zip(seconds, (afresh, appended, again), strict=True):
                seconds[name].append(result.stats["seconds"]["prefill"])
                texts.append(result.token_ids)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "link_gb_per_s": bandwidth and bandwidth / 1e9,
        "median_seconds": medians,
        "appended_of_afresh": medians["appended"] / medians["afresh"],
        "again_of_afresh": medians["again"] / medians["afresh"],
        "same_tokens": all(text == texts[0] for text in texts),
        "seconds": seconds,
    }


def check_reuse(result: Completion, tokens: int) -> None:
    """Ends the benchmark if something else was measured than it says."""
    if result.stats["reused_tokens"] != tokens:
        sys.exit(f"{result.stats['reused_tokens']} tokens were kept where {tokens} should be")


def print_table(figures: dict[str, Any]) -> None:
    table = Table("KV", "read afresh, s", "appended, s", "of afresh", "asked again, s", "same text")
    for name, figure in figures.items():
        medians = figure["median_seconds"]
        table.add_row(
            name,
            f"{medians['afresh']:.2f}",
            f"{medians['appended']:.2f}",
            f"{figure['appended_of_afresh']:.3f}",
            f"{medians['again']:.3f}",
            "yes" if figure["same_tokens"] else "NO",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
