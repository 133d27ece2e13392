"""Appending to a context: SmolLM2-135M, 1,000 new tokens of the Python manual after 6,000.

A prompt that continues the context prefills only its new tokens. Its time to the first token is
compared with that of prefilling the whole prompt, in turns in the same run, and with that of an
unchanged prompt. The greedy tokens that follow must be the same. Float32; with everything resident,
and with KV streamed over an EMULATED link.

    python scripts/bench append [--kept 6000] [--new 1000] [--repeats 5]

Writes benchmarks/results/bench_append.json. Exits with 1 if a text differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from bench.placements import KV_STREAMED, RESIDENT
from bench.workloads import MODEL, engine, greedy, stretches
from frame import Benchmark, Figures, Option, medians
from triforce_core import Completion
from triforce_offload.plan.placement import Placement

PLACEMENTS = {
    "resident": (RESIDENT, None),
    "KV streamed, EMULATED link": (KV_STREAMED, 0.5e9),
}
FOLLOWING = 16


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {"model": f"{MODEL} float32", "kept_tokens": args.kept, "new_tokens": args.new}
    for name, (placement, bandwidth) in PLACEMENTS.items():
        yield {"placements": {name: timed_prompts(args, placement, bandwidth)}}


def timed_prompts(
    args: argparse.Namespace, placement: Placement, bandwidth: float | None
) -> Figures:
    """Time the first token after prefilling the whole prompt, its new tokens only, or nothing."""
    seconds: dict[str, list[float]] = {"afresh": [], "appended": [], "again": []}
    texts: list[list[int]] = []
    length = args.kept + args.new
    with engine(
        length + FOLLOWING, method="autoregressive", placement=placement, link_bandwidth=bandwidth
    ) as model:
        (prompt,) = stretches(1, length)
        for _ in range(args.repeats):
            afresh = model.generate(prompt, greedy(FOLLOWING), reuse=False)
            model.generate(prompt[: args.kept], greedy(1), reuse=False)
            appended = model.generate(prompt, greedy(FOLLOWING))
            again = model.generate(prompt, greedy(FOLLOWING))
            check_reuse(appended, args.kept)
            check_reuse(again, length - 1)
            for name, result in zip(seconds, (afresh, appended, again), strict=True):
                seconds[name].append(result.stats["seconds"]["prefill"])
                texts.append(result.token_ids)
    middle = medians(seconds)
    return {
        "link_gb_per_s": bandwidth and bandwidth / 1e9,
        "median_seconds": middle,
        "appended_of_afresh": middle["appended"] / middle["afresh"],
        "again_of_afresh": middle["again"] / middle["afresh"],
        "same_tokens": all(text == texts[0] for text in texts),
        "seconds": seconds,
    }


def check_reuse(result: Completion, tokens: int) -> None:
    """Exit if a different number of tokens was reused than the benchmark assumes."""
    if result.stats["reused_tokens"] != tokens:
        sys.exit(f"{result.stats['reused_tokens']} tokens were reused instead of {tokens}")


main = Benchmark(
    __doc__,
    "bench_append",
    measure,
    (
        Option("--kept", 6000, "tokens of the context"),
        Option("--new", 1000, "tokens that are appended to it"),
        Option("--repeats", 5, "runs of each, in turns"),
    ),
)
