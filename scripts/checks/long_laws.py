"""L1, L2, L3: long tests that the output has the target model's distribution.

L1: the acceptance rule alone, with 50 configurations of 200,000 draws of chains, and as many of
trees.
L2: two levels over Markov chains; the tests detect planted faults with fewer tokens.
L3: the whole engine on a tiny model: every outcome of the first three tokens, all drafters,
policies and rules, at two temperatures, with and without top-p.

    python scripts/checks long_laws [--draws 200000] [--tokens 120000] [--samples 200000]

Writes benchmarks/results/long_laws.json. Exits with 1 if a p-value is below 1e-6.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from checks.tests_folder import use_tests
from frame import Benchmark, Figures, Option

CONFIGURATIONS = 50
# The counts of drawn tokens and their expected distributions, with a row for each position.
Counts = tuple[torch.Tensor, torch.Tensor]


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    use_tests("core/decoding")
    from law_tests import LEAST_P

    yield {"least_p_allowed": LEAST_P}
    for name, figures in (
        ("L1", lambda: rule(chains(args.draws), args.draws)),
        ("L1, trees", lambda: rule(trees(args.draws), args.draws)),
        ("L2", lambda: levels(args.tokens)),
        ("L3", lambda: engine(args.samples)),
    ):
        began = time.perf_counter()
        yield {name: figures() | {"seconds": round(time.perf_counter() - began)}}


def rule(counted: Iterator[Counts], draws: int) -> Figures:
    from law_tests import p_value

    p_values, distance = [], 0.0
    for counts, target in counted:
        p_values += [p_value(counts[i : i + 1], target[i : i + 1]) for i in range(len(counts))]
        if target.shape[1] == 16:
            first = counts[0] / counts[0].sum()
            distance = max(distance, float((first - target[0]).abs().sum() / 2))
    return {
        "configurations": CONFIGURATIONS,
        "draws": draws,
        "p_values": len(p_values),
        "least_p": min(p_values),
        "most_total_variation_at_16": distance,
    }


def chains(draws: int) -> Iterator[Counts]:
    from law_tests import configuration, emitted

    for seed in range(CONFIGURATIONS):
        draft, target = configuration(seed)
        yield emitted(draft, target, draws, torch.Generator().manual_seed(7000 + seed)), target


def trees(draws: int) -> Iterator[Counts]:
    from law_tests import emitted_by_trees, tree_configuration

    for seed in range(CONFIGURATIONS):
        branches, draft, target = tree_configuration(seed)
        coins = torch.Generator().manual_seed(8000 + seed)
        yield emitted_by_trees(branches, draft, target, draws, coins), target


def levels(tokens: int) -> Figures:
    import test_planted_faults as tests

    p_values = {
        f"{outer}, {inner}": tests.run(lengths=(outer, inner), tokens=tokens)[0]
        for outer, inner in tests.LENGTHS
    }
    return {
        "tokens": tokens,
        "p_values_by_draft_lengths": p_values,
        "least_p": min(p_values.values()),
    }


def engine(samples: int) -> Figures:
    import test_output_law as tests
    from exact_distributions import target_and_drafter

    p_values_of = {}
    with (
        tempfile.TemporaryDirectory() as root,
        ProcessPoolExecutor(
            os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool,
    ):
        models = target_and_drafter(Path(root))
        for temperature in (0.6, 1.0):
            for top_p in (1.0, 0.9):
                _, p_values_of[f"T={temperature} top_p={top_p}"] = tests.measure(
                    *models, temperature, top_p, samples, pool.map
                )
    return {
        "samples_each": samples,
        "outcomes": tests.VOCAB**tests.TOKENS,
        "p_values": p_values_of,
        "least_p": min(min(p_values.values()) for p_values in p_values_of.values()),
    }


main = Benchmark(
    __doc__,
    "long_laws",
    measure,
    (
        Option("--draws", 200_000, "draws of each configuration of L1"),
        Option("--tokens", 120_000, "tokens of L2"),
        Option(
            "--samples",
            200_000,
            "samples of L3, of all ways together, at each temperature and top-p",
        ),
    ),
)
