"""Tokens a pass gives by drafts that branch, beside chains of the same drafter and as many tokens.

SmolLM2-135M in bfloat16, its first layers as the drafter (`make_shallow_draft.py`), and n-gram
lookup, both proposing straight to the target. The figures are counts: of tokens and of passes, on
any machine the same but for rounding.

    python scripts/bench_trees.py [--layers 24] [--nodes 24] [--tokens 800] [--new-tokens 150]

Prints a table and writes benchmarks/results/bench_trees.json.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from make_shallow_draft import make_shallow_draft
from material import model_file
from results import write_result
from rich.console import Console
from rich.table import Table
from workloads import generate_fully, prompt

from triforce_core import Engine, SamplingParams
from triforce_core.model.tokenizer import load_tokenizer

TASKS = ("continuation", "question", "code")
TEMPERATURES = (0.6, 0.0)
TREE, CHAIN = "tree", "chain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--layers", type=int, default=24, help="of the drafter")
    parser.add_argument("--nodes", type=int, default=24, help="of each draft")
    parser.add_argument("--tokens", type=int, default=800, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2, help="sampled texts of each prompt")
    args = parser.parse_args()
    record: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct.Q4_1 as bfloat16",
        "drafter_layers": args.layers,
        "nodes": args.nodes,
        "prompt_tokens": args.tokens,
        "new_tokens": args.new_tokens,
        "seeds": args.seeds,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        shallow = Path(scratch) / "drafter"
        make_shallow_draft(str(model_file()), shallow, args.layers, torch.bfloat16)
        for draft in ("ngram", str(shallow)):
            for temperature in TEMPERATURES:
                record["rows"].append(compared(args, draft, temperature))
                write_result("bench_trees", record)
    path = write_result("bench_trees", record)
    show(record)
    print(f"written to {os.path.relpath(path)}")


def compared(args: argparse.Namespace, draft: str, temperature: float) -> dict[str, Any]:
    """Trees and chains of one drafter, over all tasks."""
    tokenizer = load_tokenizer(model_file(), None)
    row: dict[str, Any] = {
        "drafter": draft if draft == "ngram" else f"first {args.layers} layers",
        "temperature": temperature,
    }
    for shape in (TREE, CHAIN):
        with Engine.from_pretrained(
            model_file(),
            tokenizer=tokenizer,
            device="cpu",
            dtype="bfloat16",
            method="speculative",
            draft=draft,
            draft_tokens=args.nodes,
            tree=args.nodes if shape == TREE else "off",
            max_context=args.tokens + args.new_tokens,
        ) as engine:
            each = [generated(engine, args, task, temperature) for task in TASKS]
        tokens, passes = (sum(part) for part in zip(*each, strict=True))
        row[shape] = {
            "tokens_per_pass": tokens / passes,
            "passes": passes,
            "by_task": {task: t / p for task, (t, p) in zip(TASKS, each, strict=True)},
        }
        print(f"{row['drafter']}, {temperature}, {shape}: {tokens / passes:.2f}", flush=True)
    row["times_chain"] = row[TREE]["tokens_per_pass"] / row[CHAIN]["tokens_per_pass"]
    return row


def generated(
    engine: Engine, args: argparse.Namespace, task: str, temperature: float
) -> tuple[int, int]:
    """How many tokens passes gave, and how many passes these were."""
    ids = prompt(task, engine.tokenizer, args.tokens)
    if temperature:
        seeds = range(1, args.seeds + 1)
        each = [generate_fully(engine, ids, args.new_tokens, seed) for seed in seeds]
    else:
        params = SamplingParams(args.new_tokens, temperature=0)
        each = [engine.generate(ids, params, reuse=False).stats]
    # The first token comes from the prompt's logits.
    tokens = sum(stats["new_tokens"] - 1 for stats in each)
    return tokens, sum(stats["passes"] for stats in each)


def show(record: dict[str, Any]) -> None:
    table = Table(title=f"tokens per pass, drafts of {record['nodes']} tokens")
    for column in ("drafter", "temperature", "tree", "chain", "times"):
        table.add_column(column)
    for row in record["rows"]:
        table.add_row(
            row["drafter"],
            str(row["temperature"]),
            f"{row[TREE]['tokens_per_pass']:.2f}",
            f"{row[CHAIN]['tokens_per_pass']:.2f}",
            f"{row['times_chain']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
