"""Seconds per token of every method over an EMULATED link, SmolLM2-135M after 6,000 tokens.

The KV cache streams, and the link is paced so that one full pass takes 100 times one step of the
retrieval model, as 2.5 s to 25 ms on an RTX 4090; also 30 and 300 times. Every method gets the same
prompts in the same run; figures are medians over the prompts. The drafter is n-gram lookup.

1. autoregressive, speculative and triforce at each ratio.
2. At 100:1, draft length `auto` against fixed ones, with `--accept coupled`, so that every length
   gives the same text and the comparison is of lengths alone.

Every run's seconds per pass and per token are also predicted by the planner, after a probe of two
seconds, and kept beside what was measured.

    python scripts/bench_triforce.py [--ratios 100 30 300] [--prompts 3]

Prints tables, writes benchmarks/results/bench_triforce.json and docs/bench_triforce.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from material import model_file, stretches
from predicted import Predicted, compare
from results import write_result
from rich.console import Console
from rich.table import Table

from offload.files import Output
from offload.placement import Placement
from triforce_core import Engine, SamplingParams
from triforce_core.cli.plot import picture
from triforce_core.model.tokenizer import load_tokenizer

PLOT = Path(__file__).parent.parent / "docs" / "bench_triforce.png"
RESULT = "bench_triforce"
KV_STREAMED = Placement((), True, 0, 0, 3, 2)
# Each method generates so many: a token of `autoregressive` is a pass, and all passes take the same
# time.
NEW_TOKENS = {"autoregressive": 4, "speculative": 13, "triforce": 129}
LENGTHS = ("auto", 24, 32, 48, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=6000, help="prompt length")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--budget", type=int, default=1024, help="of the retrieval cache")
    parser.add_argument("--ratios", type=int, nargs="+", default=[100, 30, 300])
    parser.add_argument("--lengths", nargs="*", default=LENGTHS, help="compared at 100:1")
    parser.add_argument("--length-tokens", type=int, default=97, help="generated for each length")
    parser.add_argument("--result", default=RESULT, help="name of the JSON; a plot has this one")
    args = parser.parse_args()
    bench = TriforceBench(args.tokens, args.prompts, args.budget)
    step_seconds, pass_bytes = bench.calibrate()
    ratios = {}
    for ratio in args.ratios:
        bandwidth = pass_bytes / (ratio * step_seconds)
        ratios[ratio] = {
            "link_bytes_per_second": bandwidth,
            **{
                method: bench.measure(bandwidth, tokens, method=method)
                for method, tokens in NEW_TOKENS.items()
            },
        }
        print_ratio(ratio, ratios[ratio])
    lengths = {}
    for length in args.lengths:
        fixed = length if length == "auto" else int(length)
        lengths[str(length)] = bench.measure(
            pass_bytes / (100 * step_seconds),
            args.length_tokens,
            accept="coupled",
            draft_tokens=fixed,
        )
    path = write_result(
        args.result,
        {
            **workload(args, "float32"),
            "retrieval_step_seconds": step_seconds,
            "bytes_per_pass": pass_bytes,
            "pass_to_retrieval_step": ratios,
            "draft_lengths_coupled_100": lengths,
        },
    )
    if lengths:
        print_lengths(lengths)
    if args.result == RESULT:
        plot(ratios)
        print(f"written to {os.path.relpath(PLOT)}")
    print(f"written to {os.path.relpath(path)}")


def workload(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """What a record says of the texts and of how they are drawn."""
    return {
        "model": f"SmolLM2-135M-Instruct.Q4_1 as {dtype}",
        "link": "emulated",
        "prompt_tokens": args.tokens,
        "prompts": args.prompts,
        "temperature": 0.6,
        "top_p": 0.9,
        "budget": args.budget,
    }


class TriforceBench:
    """The prompts, and engines over links of different speeds."""

    def __init__(self, tokens: int, prompts: int, budget: int) -> None:
        self._tokenizer = load_tokenizer(model_file())
        self._prompts = stretches(self._tokenizer, prompts, tokens)
        self._tokens = tokens
        self._budget = budget
        self._predicted = Predicted.now(str(model_file()))

    def calibrate(self) -> tuple[float, float]:
        """Seconds of one step of the retrieval model over one token, and bytes of one pass."""
        with self._engine(None, 66, draft="none", draft_tokens=32) as engine:
            return step_and_pass(engine, self._prompts[0], 66)

    def measure(self, bandwidth: float, new_tokens: int, **options: Any) -> dict[str, Any]:
        runs = []
        with self._engine(bandwidth, new_tokens, **options) as engine:
            for seed, prompt in enumerate(self._prompts):
                runs.append(self._run(engine, bandwidth, prompt, new_tokens, seed))
        per_token = [run["seconds_per_token"] for run in runs]
        return {
            "seconds_per_token": statistics.median(per_token),
            "tokens_per_pass": statistics.median(run["tokens_per_pass"] for run in runs),
            "overhead": statistics.median(run["overhead"] for run in runs),
            "prediction": {
                name: compare(
                    statistics.median(run["predicted"][name] for run in runs),
                    statistics.median(run[name] for run in runs),
                )
                for name in ("seconds_per_pass", "seconds_per_token")
            },
            "all_prompts_seconds_per_token": sum(r["decode_seconds"] for r in runs)
            / sum(r["new_tokens"] - 1 for r in runs),
            "runs": runs,
        }

    def _run(
        self, engine: Engine, bandwidth: float, prompt: list[int], new_tokens: int, seed: int
    ) -> dict[str, Any]:
        while True:
            params = SamplingParams(new_tokens, temperature=0.6, top_p=0.9, seed=seed)
            with stopwatch(engine) as watch:
                stats = engine.generate(prompt, params, reuse=False).stats
            if stats["finish_reason"] == "length":
                break
            # A text that ends fills no passes: another one.
            seed += 1000
        decode = stats["seconds"]["decode"]
        return {
            "seed": seed,
            "new_tokens": stats["new_tokens"],
            "decode_seconds": decode,
            "seconds_per_token": stats["seconds_per_token"],
            "passes": stats["passes"],
            "tokens_per_pass": stats["tokens_per_pass"],
            "seconds_per_pass": stats["seconds"]["verify"] / stats["passes"]
            if stats["seconds"]["verify"]
            else decode / stats["passes"],
            "draft_seconds": stats["seconds"]["draft"],
            "overhead": 1 - watch.decode_seconds / decode,
            "acceptance": stats["acceptance"],
            "draft_tokens": stats["draft_tokens"],
            "retrieval": stats["retrieval"],
            "predicted": self._predicted.run(engine, bandwidth, stats),
        }

    def _engine(self, bandwidth: float | None, new_tokens: int, **options: Any) -> Engine:
        return Engine.from_pretrained(
            model_file(),
            device="cpu",
            link_bandwidth=bandwidth,
            budget=self._budget,
            max_context=self._tokens + new_tokens,
            placement=KV_STREAMED,
            tokenizer=self._tokenizer,
            **options,
        )


def step_and_pass(engine: Engine, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Seconds of one step of the retrieval model over one token, and bytes of one pass, of an
    engine whose retrieval model drafts alone.
    """
    params = SamplingParams(new_tokens, temperature=0.6, top_p=0.9, seed=0)
    # Warms up.
    engine.generate(prompt, params, reuse=False)
    with stopwatch(engine) as watch:
        stats = engine.generate(prompt, params, reuse=False).stats
    # With nothing to verify, every forward of one token is a step of the retrieval model.
    link = stats["link"]
    moved = link["floor_seconds_per_pass"] * link["bandwidth_gb_per_s"] * 1e9
    return statistics.median(watch.single_token_seconds), moved


class Stopwatch:
    """Seconds inside model forwards and waiting for the link, from the first forward after the
    prompt's; and of each forward over one token, its head included.
    """

    def __init__(self) -> None:
        self.decode_seconds = 0.0
        self.single_token_seconds: list[float] = []
        self._inside = self._decoding = self._single = False

    def timed(self, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._count(function.__name__, args, kwargs, time.perf_counter() - began)
                self._inside = False

        return timed

    def _count(self, name: str, args: tuple, kwargs: dict, seconds: float) -> None:
        if name == "forward":
            self._decoding = not kwargs.get("chunk")
            self._single = self._decoding and args[0].rows == 1
            if self._single:
                self.single_token_seconds.append(0.0)
        if self._decoding:
            self.decode_seconds += seconds
        if self._single and name in ("forward", "logits"):
            self.single_token_seconds[-1] += seconds


@contextmanager
def stopwatch(engine: Engine) -> Iterator[Stopwatch]:
    """Times one request of an engine from outside."""
    watch = Stopwatch()
    model, link = engine.model, engine.runtime.link
    wrapped = [(model, "forward"), (model, "logits"), (link, "wait"), (link, "wait_on_host")]
    for owner, name in wrapped:
        setattr(owner, name, watch.timed(getattr(owner, name)))
    try:
        yield watch
    finally:
        for owner, name in wrapped:
            delattr(owner, name)


def print_ratio(ratio: int, row: dict[str, Any]) -> None:
    table = Table(
        f"EMULATED link, {ratio}:1",
        "s/token",
        "speed-up",
        "tokens/pass",
        "overhead",
        "predicted s/token",
    )
    plain = row["autoregressive"]["seconds_per_token"]
    for method in NEW_TOKENS:
        figures = row[method]
        row[method]["speed_up"] = plain / figures["seconds_per_token"]
        table.add_row(
            method,
            f"{figures['seconds_per_token']:.3f}",
            f"{figures['speed_up']:.2f}",
            f"{figures['tokens_per_pass']:.2f}",
            f"{figures['overhead']:.1%}",
            f"{figures['prediction']['seconds_per_token']['predicted']:.3f}",
        )
    Console().print(table)


def print_lengths(lengths: dict[str, Any]) -> None:
    table = Table("draft length, coupled, 100:1", "s/token", "tokens/pass", "to the best fixed")
    fixed = [
        row["all_prompts_seconds_per_token"] for name, row in lengths.items() if name != "auto"
    ]
    for name, row in lengths.items():
        seconds = row["all_prompts_seconds_per_token"]
        table.add_row(
            name,
            f"{seconds:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{seconds / min(fixed):.3f}" if fixed else "",
        )
    Console().print(table)


def plot(ratios: dict[int, dict[str, Any]]) -> None:
    """Bars of seconds per token at each ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(ratios), figsize=(3.4 * len(ratios), 3.4))
    for axis, ratio in zip(axes if len(ratios) > 1 else [axes], sorted(ratios), strict=True):
        seconds = [ratios[ratio][method]["seconds_per_token"] for method in NEW_TOKENS]
        bars = axis.bar(list(NEW_TOKENS), seconds, color=["#9aa0a6", "#6fa8dc", "#3a7d44"])
        axis.bar_label(bars, [f"{seconds[0] / s:.1f}x" for s in seconds])
        axis.set_title(f"pass : retrieval step = {ratio} : 1", fontsize=9)
        axis.set_ylim(0, seconds[0] * 1.15)
        axis.tick_params(axis="x", labelsize=7)
    figure.supylabel("seconds per token, emulated link", fontsize=9)
    figure.tight_layout()
    Output(PLOT, "plot").write(picture(figure, PLOT, dpi=120))


if __name__ == "__main__":
    main()
