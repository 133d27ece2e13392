"""How many draft tokens of the retrieval level the target accepts, on a real model and text.

SmolLM2-135M over parts of the Python manual, at temperature 0.6 and top-p 0.9; the retrieval level
drafts alone. The figures are the acceptance and the tokens per pass of each policy. None depends on
the machine's speed. `--task fact` asks for facts far back in the text, and counts the tokens of the
answers.

    python scripts/bench acceptance [--budget 1024] [--draft-tokens 24]
    python scripts/bench acceptance --task fact --new-tokens 12 --draft-tokens 6
    python scripts/bench acceptance --policies mass --set draft_kv=int8 dtype=float32 --budget 6160

`--set` gives the engine options, such as those for weights and KV in fewer bits: with the whole
text in the retrieval cache, only the fewer bits cause rejections. Writes
benchmarks/results/bench_acceptance.json or bench_acceptance_fact.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from bench import workloads
from bench.workloads import FACTS, MODEL, SAMPLING, generate_fully, stretches
from frame import Benchmark, Figures, Option
from rivals.published_policies import MEAN_KEYS, installed
from triforce_core import Engine, SamplingParams
from triforce_core.decoding import acceptance
from triforce_core.decoding.drafters.retrieval import RetrievalCache

# A function that answers a prompt: (engine, prompt, number of tokens, seed) -> statistics.
Answer = Callable[[Engine, list[int], int, int], dict[str, Any]]


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    given = dict(each.split("=", 1) for each in args.set)
    yield {
        "model": f"{MODEL} {given.get('dtype', 'float32')}",
        "task": args.task,
        "prompt_tokens": args.tokens,
        **SAMPLING,
        "chunk_size": 8,
        "budget": args.budget,
        "draft_tokens": args.draft_tokens,
        "options": args.set,
    }
    facts = args.task == "fact"
    if facts:
        prompts = [
            workloads.prompt("fact", workloads.tokenizer(), args.tokens, fact)
            for fact in range(len(FACTS))
        ]
    else:
        prompts = stretches(args.stretches, args.tokens)
    for policy in args.policies or list(POLICIES)[: 3 if facts else 2]:
        with POLICIES[policy]():
            answer = short_answer if facts else generate_fully
            options = {"budget": args.budget, **given}
            row = accepted(prompts, args.new_tokens, args.draft_tokens, answer, **options)
        yield {"policies": {policy: row}}


def short_answer(engine: Engine, ids: list[int], new_tokens: int, seed: int) -> dict[str, Any]:
    """Return the statistics of an answer that may end before its full length."""
    params = SamplingParams(new_tokens, **SAMPLING, seed=seed)
    return engine.generate(ids, params, reuse=False).stats


def accepted(
    prompts: list[list[int]],
    new_tokens: int,
    draft_tokens: int,
    answer: Answer = generate_fully,
    **options: Any,
) -> Figures:
    """Return the acceptance (accepted / examined tokens) and the tokens per pass, over all prompts.

    The retrieval level drafts alone. options: engine options
    """
    runs, expected = [], Expected()
    context = max(map(len, prompts)) + new_tokens
    options = {"draft": "none", "draft_tokens": draft_tokens, "max_context": context, **options}
    with patch.object(acceptance, "accept", expected.accept), workloads.engine(**options) as engine:
        for seed, ids in enumerate(prompts):
            stats = answer(engine, ids, new_tokens, seed)
            lengths = stats["acceptance"]["accepted_lengths"]
            held = sum(i * n for i, n in enumerate(lengths))
            examined = held + sum(lengths[:draft_tokens])
            runs.append(
                {
                    "seed": seed,
                    **{name: stats[name] for name in ("text", "new_tokens", "passes")},
                    "accepted": held,
                    "examined": examined,
                    "acceptance": held / examined,
                    "tokens_per_pass": stats["tokens_per_pass"],
                    "accepted_lengths": lengths,
                    "churn": stats["retrieval"]["churn"],
                }
            )
    # The churn is None for a text that ended with its first pass.
    churns = [run["churn"] for run in runs if run["churn"] is not None]
    return {
        "new_tokens": sum(run["new_tokens"] for run in runs),
        "acceptance": sum(r["accepted"] for r in runs) / sum(r["examined"] for r in runs),
        "expected_acceptance": expected.mean,
        "tokens_per_pass": sum(r["new_tokens"] - 1 for r in runs) / sum(r["passes"] for r in runs),
        "churn": sum(churns) / len(churns) if churns else None,
        "levels": stats["levels"],
        "placement": stats["placement"],
        "runs": runs,
    }


class Expected:
    """The mean of sum(min(p, q)) over the examined tokens, which is the expected acceptance.

    It varies far less than the acceptance of the draws themselves.
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
        probs: torch.Tensor,
        generator: torch.Generator,
    ) -> acceptance.Verdict:
        verdict = self._accept(tokens, drafted, probs, generator)
        examined = min(int(verdict.accepted) + 1, tokens.shape[-1])
        if drafted is not None and examined:
            both = torch.minimum(drafted[:examined].double(), probs[:examined].double())
            self._sum += float(both.sum())
            self._tokens += examined
        return verdict


def newest_chunks() -> Any:
    """Make the retrieval cache choose the first chunk and the newest chunks."""
    worth = RetrievalCache._worth

    def newer(self: RetrievalCache, tokens: int, chunks: int) -> torch.Tensor:
        found = worth(self, tokens, chunks)
        index = torch.arange(chunks, dtype=found.dtype, device=found.device)
        return index.expand_as(found).contiguous()

    return patch.object(RetrievalCache, "_worth", newer)


# How chunks are chosen: as the engine does, as the published TriForce does, and the newest ones.
POLICIES = {
    "mass": nullcontext,
    "mean": partial(installed, [MEAN_KEYS], 0),
    "newest": newest_chunks,
}


main = Benchmark(
    __doc__,
    lambda args: "bench_acceptance" + ("_fact" if args.task == "fact" else ""),
    measure,
    (
        Option("--tokens", 6000, "tokens of a prompt"),
        Option("--new-tokens", 160, "generated tokens of each stretch"),
        Option("--stretches", 4, "number of prompts"),
        Option("--budget", 1024, "tokens of the retrieval cache"),
        Option("--draft-tokens", 24, "tokens of a draft"),
        Option("--policies", (), "mass and mean; newest as well with --task fact"),
        Option("--set", (), "options of the engine", metavar="NAME=VALUE"),
        Option("--task", "continuation", choices=("continuation", "fact")),
    ),
)
