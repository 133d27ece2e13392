"""The long versions of the statistical tests: is what comes out really the full model's law?

L1: the acceptance rule alone, 50 configurations of 200,000 draws of chains, and as many of trees.
L2: two levels over Markov chains, whose planted faults the tests kill with fewer tokens.
L3: the whole engine on a tiny model, every outcome of the first three tokens, all drafters,
policies and rules, at two temperatures, with and without top-p.

    python scripts/long_laws.py [--draws 200000] [--tokens 120000] [--samples 200000]

Writes benchmarks/results/long_laws.json and exits with 1 if a p-value is below 1e-6.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from results import write_result

TESTS = Path(__file__).parent.parent / "tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--draws", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--samples", type=int, default=200_000)
    args = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS / "core" / "decoding")]
    # Workers import the tests too.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    from law_tests import LEAST_P

    figures = {
        "L1": rule(args.draws),
        "L1, trees": trees(args.draws),
        "L2": levels(args.tokens),
        "L3": engine(args.samples),
    }
    least = min(figure["least_p"] for figure in figures.values())
    figures["least_p_allowed"] = LEAST_P
    path = write_result("long_laws", figures)
    print(f"written to {os.path.relpath(path)}")
    return 1 if least < LEAST_P else 0


def rule(draws: int) -> dict:
    from law_tests import configuration, emitted, p_value

    began, p_values, distance = time.perf_counter(), [], 0.0
    for seed in range(50):
        draft, target = configuration(seed)
        counts = emitted(draft, target, draws, torch.Generator().manual_seed(7000 + seed))
        p_values += [p_value(counts[i : i + 1], target[i : i + 1]) for i in range(len(counts))]
        if target.shape[1] == 16:
            first = counts[0] / counts[0].sum()
            distance = max(distance, float((first - target[0]).abs().sum() / 2))
    print(f"L1: least of {len(p_values)} p-values {min(p_values):.2g}, TV {distance:.4f}")
    return {
        "configurations": 50,
        "draws": draws,
        "p_values": len(p_values),
        "least_p": min(p_values),
        "most_total_variation_at_16": distance,
        "seconds": round(time.perf_counter() - began),
    }


def trees(draws: int) -> dict:
    from law_tests import emitted_by_trees, p_value, tree_configuration

    began, p_values = time.perf_counter(), []
    for seed in range(50):
        branches, draft, target = tree_configuration(seed)
        coins = torch.Generator().manual_seed(8000 + seed)
        counts = emitted_by_trees(branches, draft, target, draws, coins)
        p_values += [p_value(counts[i : i + 1], target[i : i + 1]) for i in range(len(counts))]
    print(f"L1, trees: least of {len(p_values)} p-values {min(p_values):.2g}")
    return {
        "configurations": 50,
        "draws": draws,
        "p_values": len(p_values),
        "least_p": min(p_values),
        "seconds": round(time.perf_counter() - began),
    }


def levels(tokens: int) -> dict:
    import test_planted_faults as tests

    began = time.perf_counter()
    p_values = {
        f"{outer}, {inner}": tests.run(lengths=(outer, inner), tokens=tokens)[0]
        for outer, inner in tests.LENGTHS
    }
    print(f"L2: least p {min(p_values.values()):.2g}")
    return {
        "tokens": tokens,
        "p_values_by_draft_lengths": p_values,
        "least_p": min(p_values.values()),
        "seconds": round(time.perf_counter() - began),
    }


def engine(samples: int) -> dict:
    import test_output_law as tests
    from helpers import make_model

    began, p_values_of = time.perf_counter(), {}
    with (
        tempfile.TemporaryDirectory() as root,
        ProcessPoolExecutor(
            os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool,
    ):
        target, drafter = Path(root, "target"), Path(root, "drafter")
        model = make_model("llama", target, **tests.SIZES)
        make_model("llama-mha", drafter, **tests.SIZES | {"num_key_value_heads": 2})
        for temperature in (0.6, 1.0):
            for top_p in (1.0, 0.9):
                _, p_values = tests.measure(
                    target, drafter, model, temperature, top_p, samples, pool.map
                )
                p_values_of[f"T={temperature} top_p={top_p}"] = p_values
                print(f"L3: T={temperature} top_p={top_p}: least p {min(p_values.values()):.2g}")
    return {
        "samples_each": samples,
        "outcomes": tests.VOCAB**tests.TOKENS,
        "p_values": p_values_of,
        "least_p": min(min(p_values.values()) for p_values in p_values_of.values()),
        "seconds": round(time.perf_counter() - began),
    }


if __name__ == "__main__":
    sys.exit(main())
