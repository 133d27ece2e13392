"""Seconds per token of every method over an EMULATED link, SmolLM2-135M after 6,000 tokens.

The KV cache streams. The link is so slow that a full pass takes 100 times as long as a step of the
retrieval level, like 2.5 s and 25 ms on an RTX 4090; ratios of 30 and 300 are measured too. Every
method gets the same prompts in the same run; figures are medians over the prompts. The drafter is
n-gram lookup.

1. autoregressive, speculative and triforce at each ratio.
2. At 100:1, draft length `auto` against fixed lengths, with `--accept coupled`, so that every
   length gives the same text and only lengths are compared.

The planner predicts the seconds per pass and per token of every run, after a probe of two seconds;
the record has the predictions beside the measurements.

    python scripts/bench triforce [--ratios 100 30 300] [--prompts 3]

Writes benchmarks/results/bench_triforce.json; with --plot, docs/bench_triforce.png too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.material import model_file
from bench.paced import PacedBench, stopwatch, workload
from bench.placements import KV_STREAMED
from bench.predicted import Predicted, compare
from bench.workloads import SAMPLING, stretches
from frame import ROOT, Benchmark, Figures, Option
from triforce_core import Engine, SamplingParams
from triforce_core.cli.plan.plot import picture
from triforce_offload.files import Output

PLOT = ROOT / "docs" / "bench_triforce.png"
# The number of tokens that each method generates. With `autoregressive` each token is a pass, and
# all passes take the same time.
NEW_TOKENS = {"autoregressive": 4, "speculative": 13, "triforce": 129}
RATIOS, LENGTHS = "pass_to_retrieval_step", "draft_lengths_coupled_100"


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    bench = TriforceBench(
        stretches(args.prompts, args.tokens),
        max(args.length_tokens, *NEW_TOKENS.values()),
        args.budget,
        {"placement": KV_STREAMED},
        predicted=Predicted.now(str(model_file())),
    )
    step_seconds, pass_bytes = bench.calibrate(66, draft_tokens=32)
    yield {
        **workload(args, "float32"),
        "retrieval_step_seconds": step_seconds,
        "bytes_per_pass": pass_bytes,
        RATIOS: {},
        LENGTHS: {},
    }
    ratios = {}
    for ratio in args.ratios:
        bandwidth = pass_bytes / (ratio * step_seconds)
        rows = {
            method: bench.measure(bandwidth, tokens, method=method)
            for method, tokens in NEW_TOKENS.items()
        }
        for row in rows.values():
            row["speed_up"] = rows["autoregressive"]["seconds_per_token"] / row["seconds_per_token"]
        ratios[str(ratio)] = {"link_bytes_per_second": bandwidth, **rows}
        yield {RATIOS: {str(ratio): ratios[str(ratio)]}}
    if args.plot:
        plot(ratios)
    for length in args.lengths:
        fixed = length if length == "auto" else int(length)
        bandwidth = pass_bytes / (100 * step_seconds)
        options = {"accept": "coupled", "draft_tokens": fixed}
        yield {LENGTHS: {length: bench.measure(bandwidth, args.length_tokens, **options)}}


@dataclass(frozen=True)
class TriforceBench(PacedBench):
    """Engines in float32 whose KV streams, and the planner's predictions for their runs."""

    predicted: Predicted = field(kw_only=True)

    def measure(self, bandwidth: float, new_tokens: int, **options: Any) -> Figures:
        runs = []
        with self.engine(bandwidth, **options) as engine:
            for seed, prompt in enumerate(self.prompts):
                runs.append(self._run(engine, bandwidth, prompt, new_tokens, seed))
        names = ("seconds_per_token", "tokens_per_pass", "overhead", "seconds_per_pass")
        middle = {name: statistics.median(run[name] for run in runs) for name in names}
        tokens = sum(run["new_tokens"] - 1 for run in runs)
        return {
            **middle,
            "prediction": {
                name: compare(
                    statistics.median(run["predicted"][name] for run in runs), middle[name]
                )
                for name in ("seconds_per_pass", "seconds_per_token")
            },
            "all_prompts_seconds_per_token": sum(run["decode_seconds"] for run in runs) / tokens,
            "runs": runs,
        }

    def _run(
        self, engine: Engine, bandwidth: float, prompt: list[int], new_tokens: int, seed: int
    ) -> Figures:
        while True:
            params = SamplingParams(new_tokens, **SAMPLING, seed=seed)
            with stopwatch(engine) as watch:
                stats = engine.generate(prompt, params, reuse=False).stats
            if stats["finish_reason"] == "length":
                break
            # A text that ends early does not fill its last passes.
            seed += 1000
        decode = stats["seconds"]["decode"]
        shown = ("new_tokens", "seconds_per_token", "passes", "tokens_per_pass", "acceptance")
        return {
            "seed": seed,
            **{name: stats[name] for name in (*shown, "draft_tokens", "retrieval")},
            "decode_seconds": decode,
            "seconds_per_pass": (stats["seconds"]["verify"] or decode) / stats["passes"],
            "draft_seconds": stats["seconds"]["draft"],
            "overhead": 1 - watch.decode_seconds / decode,
            "predicted": self.predicted.run(engine, bandwidth, stats),
        }


def plot(ratios: dict[str, Figures]) -> None:
    """Draw a bar chart of seconds per token at each ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(ratios), figsize=(3.4 * len(ratios), 3.4), squeeze=False)
    for axis, ratio in zip(axes[0], sorted(ratios, key=int), strict=True):
        seconds = [ratios[ratio][method]["seconds_per_token"] for method in NEW_TOKENS]
        bars = axis.bar(list(NEW_TOKENS), seconds, color=["#9aa0a6", "#6fa8dc", "#3a7d44"])
        axis.bar_label(bars, [f"{seconds[0] / s:.1f}x" for s in seconds])
        axis.set_title(f"pass : retrieval step = {ratio} : 1", fontsize=9)
        axis.set_ylim(0, seconds[0] * 1.15)
        axis.tick_params(axis="x", labelsize=7)
    figure.supylabel("seconds per token, emulated link", fontsize=9)
    figure.tight_layout()
    Output(PLOT, "plot").write(picture(figure, PLOT, dpi=120))


main = Benchmark(
    __doc__,
    "bench_triforce",
    measure,
    (
        Option("--tokens", 6000, "tokens of a prompt"),
        Option("--prompts", 3, "number of prompts"),
        Option("--budget", 1024, "tokens of the retrieval cache"),
        Option("--ratios", (100, 30, 300), "seconds of a pass over those of a step"),
        Option("--lengths", ("auto", "24", "32", "48", "64"), "compared at 100:1", nargs="*"),
        Option("--length-tokens", 97, "tokens that are generated with each length"),
        Option("--plot", False, "draw docs/bench_triforce.png"),
    ),
)
