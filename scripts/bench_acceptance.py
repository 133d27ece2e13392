"""How much of what the retrieval model drafts the full model accepts, on a real model and text.

SmolLM2-135M over stretches of 6,000 tokens of the Python manual, temperature 0.6, top-p 0.9, the
retrieval model drafting for itself; for each policy the acceptance and the tokens per pass. No
figure here depends on the machine's speed. `--task fact` asks for facts that were told once, far
back, and counts the tokens of the answers: does retrieval bring them?

    python scripts/bench_acceptance.py [--budget 1024] [--draft-tokens 24]
    python scripts/bench_acceptance.py --task fact --new-tokens 12 --draft-tokens 6

Prints a table and writes benchmarks/results/bench_acceptance.json.
"""

from __future__ import annotations

import argparse
import os
from typing import Any
from unittest.mock import patch

import torch
from material import model_file, stretches
from results import write_result
from rich.console import Console
from rich.table import Table
from rivals.published_policies import NEWEST, installed
from workloads import FACTS, generate_fully, prompt

from triforce_core import Engine, SamplingParams
from triforce_core.decoding import acceptance
from triforce_core.model.tokenizer import Tokenizer, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=6000, help="prompt length")
    parser.add_argument("--new-tokens", type=int, default=160, help="generated from each stretch")
    parser.add_argument("--stretches", type=int, default=4)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--draft-tokens", type=int, default=24)
    parser.add_argument("--policies", nargs="+", help="mass and mean; of facts the newest too")
    parser.add_argument("--task", choices=("continuation", "fact"), default="continuation")
    args = parser.parse_args()
    tokenizer = load_tokenizer(model_file())
    if args.task == "fact":
        prompts = [prompt("fact", tokenizer, args.tokens, i) for i in range(len(FACTS))]
    else:
        prompts = stretches(tokenizer, args.stretches, args.tokens)
    figures = {}
    known = ["mass", "mean", NEWEST] if args.task == "fact" else ["mass", "mean"]
    for policy in args.policies or known:
        newest = policy == NEWEST
        with installed([NEWEST] if newest else [], 0):
            options = {"retrieval": "mass" if newest else policy}
            figures[policy] = measure(args, options, prompts, tokenizer)
    path = write_result(
        "bench_acceptance" if args.task == "continuation" else f"bench_acceptance_{args.task}",
        {
            "model": "SmolLM2-135M-Instruct.Q4_1 as float32",
            "task": args.task,
            "prompt_tokens": args.tokens,
            "temperature": 0.6,
            "top_p": 0.9,
            "chunk_size": 8,
            "budget": args.budget,
            "draft_tokens": args.draft_tokens,
            "policies": figures,
        },
    )
    table = Table("policy", "acceptance", "tokens per pass", "churn", "per stretch")
    for policy, row in figures.items():
        table.add_row(
            policy,
            f"{row['acceptance']:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['churn']:.3f}",
            " ".join(
                f"{one['acceptance']:.3f}/{one['tokens_per_pass']:.1f}" for one in row["runs"]
            ),
        )
    Console().print(table)
    print(f"written to {os.path.relpath(path)}")


def measure(
    args: argparse.Namespace,
    options: dict[str, Any],
    prompts: list[list[int]],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Acceptance (accepted tokens of those examined) and tokens per pass, over all prompts, of an
    engine with these options.
    """
    runs, expected = [], Expected()
    settings = {"device": "cpu", "draft": "none", "draft_tokens": args.draft_tokens}
    settings |= {"budget": args.budget, "max_context": args.tokens + args.new_tokens}
    with (
        patch.object(acceptance, "accept", expected.accept),
        Engine.from_pretrained(model_file(), tokenizer=tokenizer, **(settings | options)) as engine,
    ):
        for seed, ids in enumerate(prompts):
            stats, text = generate(args, engine, ids, seed)
            lengths = stats["acceptance"]["accepted_lengths"]
            accepted = sum(i * n for i, n in enumerate(lengths))
            examined = accepted + sum(lengths[: args.draft_tokens])
            runs.append(
                {
                    "seed": seed,
                    "text": text,
                    "new_tokens": stats["new_tokens"],
                    "passes": stats["passes"],
                    "accepted": accepted,
                    "examined": examined,
                    "acceptance": accepted / examined,
                    "tokens_per_pass": stats["tokens_per_pass"],
                    "accepted_lengths": lengths,
                    "churn": stats["retrieval"]["churn"],
                }
            )
    return {
        "new_tokens": sum(run["new_tokens"] for run in runs),
        "acceptance": sum(r["accepted"] for r in runs) / sum(r["examined"] for r in runs),
        "expected_acceptance": expected.mean,
        "tokens_per_pass": sum(r["new_tokens"] - 1 for r in runs) / sum(r["passes"] for r in runs),
        "churn": sum(r["churn"] for r in runs) / len(runs),
        "runs": runs,
    }


class Expected:
    """What acceptance is on average over the draws, at the tokens that were examined: the sum of
    min(p, q) over the vocabulary. It varies far less than the draws themselves.
    """

    def __init__(self) -> None:
        self._sum, self._tokens = 0.0, 0
        self._accept = acceptance.accept

    @property
    def mean(self) -> float | None:
        return self._sum / self._tokens if self._tokens else None

    def accept(
        self,
        tokens: torch.Tensor,
        drafted: torch.Tensor | None,
        laws: torch.Tensor,
        generator: torch.Generator,
    ) -> acceptance.Verdict:
        verdict = self._accept(tokens, drafted, laws, generator)
        examined = min(int(verdict.accepted) + 1, tokens.shape[-1])
        if drafted is not None and examined:
            both = torch.minimum(drafted[:examined].double(), laws[:examined].double())
            self._sum += float(both.sum())
            self._tokens += examined
        return verdict


def generate(
    args: argparse.Namespace, engine: Engine, ids: list[int], seed: int
) -> tuple[dict, str]:
    """Stats and text of an answer; of a continuation, of one that fills its length."""
    if args.task != "fact":
        stats = generate_fully(engine, ids, args.new_tokens, seed)
        return stats, stats["text"]
    params = SamplingParams(args.new_tokens, temperature=0.6, top_p=0.9, seed=seed)
    result = engine.generate(ids, params, reuse=False)
    return result.stats, result.text


if __name__ == "__main__":
    main()
