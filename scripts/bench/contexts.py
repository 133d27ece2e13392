"""The time that a saved context saves: prefilling 6,000 tokens, against loading them from a file.

SmolLM2-135M in float32, with everything on the device. One engine prefills a text and saves it;
another loads it and continues. Its greedy tokens must equal those of the first engine.

    python scripts/bench contexts [--tokens 6000] [--repeats 3]

Writes benchmarks/results/bench_contexts.json. Exits with 1 if the tokens differ.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.workloads import MODEL, engine, greedy, stretches, tokenizer
from frame import Benchmark, Figures, Option, medians, timed
from triforce_core import SamplingParams


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    (prompt,) = stretches(1, args.tokens)
    following = [*prompt, *tokenizer().encode(" In short:")]
    seconds: dict[str, list[float]] = {"prefill": [], "save": [], "load": [], "next_turn": []}
    context = args.tokens + 64
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "context.safetensors"
        with engine(context, method="autoregressive") as model:
            for _ in range(args.repeats):
                stats = model.generate(prompt, SamplingParams(1), reuse=False).stats
                seconds["prefill"].append(stats["seconds"]["prefill"])
            seconds["save"].append(timed(lambda: model.save_context(path)))
            expected = model.generate(following, greedy(16))
        with engine(context, method="autoregressive") as model:
            for _ in range(args.repeats):
                model.forget()
                seconds["load"].append(timed(lambda: model.load_context(path)))
                found = model.generate(following, greedy(16))
                seconds["next_turn"].append(found.stats["seconds"]["prefill"])
        size = path.stat().st_size
    middle = medians(seconds)
    yield {
        "model": f"{MODEL} float32",
        "prompt_tokens": args.tokens,
        "file_bytes": size,
        "same_tokens": found.token_ids == expected.token_ids,
        "reused_tokens": found.stats["reused_tokens"],
        "median_seconds": middle,
        "load_over_prefill": middle["load"] / middle["prefill"],
        "seconds": seconds,
    }


main = Benchmark(
    __doc__,
    "bench_contexts",
    measure,
    (
        Option("--tokens", 6000, "tokens of the context"),
        Option("--repeats", 3, "times that it is prefilled, and loaded"),
    ),
)
