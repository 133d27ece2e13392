"""Tokens per pass of draft trees, beside chains of the same drafter with as many tokens.

SmolLM2-135M in bfloat16. Its own first layers (`make_shallow_draft`) and n-gram lookup draft
directly for the target. The figures are counts of tokens and passes, which are the same on any
machine except for rounding.

    python scripts/bench trees [--layers 24] [--nodes 24] [--tokens 800] [--new-tokens 150]

Writes benchmarks/results/bench_trees.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import workloads
from bench.make_shallow_draft import make_shallow_draft
from bench.material import model_file
from bench.workloads import MODEL, generate_fully, greedy
from frame import Benchmark, Figures, Option
from triforce_core import Engine

TASKS = ("continuation", "question", "code")
TEMPERATURES = (0.6, 0.0)


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {
        "model": f"{MODEL} bfloat16",
        "drafter_layers": args.layers,
        "nodes": args.nodes,
        "prompt_tokens": args.tokens,
        "new_tokens": args.new_tokens,
        "seeds": args.seeds,
    }
    with tempfile.TemporaryDirectory() as scratch:
        shallow = Path(scratch) / "drafter"
        make_shallow_draft(str(model_file()), shallow, args.layers, torch.bfloat16)
        for draft in ("ngram", str(shallow)):
            for temperature in TEMPERATURES:
                yield {"rows": [compared(args, draft, temperature)]}


def compared(args: argparse.Namespace, draft: str, temperature: float) -> Figures:
    """Compare trees and chains of one drafter, over all tasks."""
    row: Figures = {
        "drafter": draft if draft == "ngram" else f"first {args.layers} layers",
        "temperature": temperature,
    }
    for shape, tree in (("tree", args.nodes), ("chain", "off")):
        with workloads.engine(
            args.tokens + args.new_tokens,
            dtype="bfloat16",
            method="speculative",
            draft=draft,
            draft_tokens=args.nodes,
            tree=tree,
        ) as engine:
            each = [generated(engine, args, task, temperature) for task in TASKS]
        tokens, passes = (sum(part) for part in zip(*each, strict=True))
        row[shape] = {
            "tokens_per_pass": tokens / passes,
            "passes": passes,
            "by_task": {task: t / p for task, (t, p) in zip(TASKS, each, strict=True)},
        }
    row["times_chain"] = row["tree"]["tokens_per_pass"] / row["chain"]["tokens_per_pass"]
    return row


def generated(
    engine: Engine, args: argparse.Namespace, task: str, temperature: float
) -> tuple[int, int]:
    """Return the number of tokens that passes gave, and the number of passes."""
    ids = workloads.prompt(task, engine.tokenizer, args.tokens)
    if temperature:
        seeds = range(1, args.seeds + 1)
        each = [generate_fully(engine, ids, args.new_tokens, seed) for seed in seeds]
    else:
        each = [engine.generate(ids, greedy(args.new_tokens), reuse=False).stats]
    # The first token comes from prefill.
    tokens = sum(stats["new_tokens"] - 1 for stats in each)
    return tokens, sum(stats["passes"] for stats in each)


main = Benchmark(
    __doc__,
    "bench_trees",
    measure,
    (
        Option("--layers", 24, "layers of the drafter"),
        Option("--nodes", 24, "tokens of each draft"),
        Option("--tokens", 800, "tokens of each prompt"),
        Option("--new-tokens", 150, "tokens that are generated after it"),
        Option("--seeds", 2, "sampled texts of each prompt"),
    ),
)
