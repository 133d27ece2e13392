"""Seconds per token over an EMULATED link with memory for a third of the exact layers.

SmolLM2-135M in bfloat16 after 1,500 tokens of the manual; a third of the layers is on the device,
the others stream in every pass, and level 1 computes with copies of those in 4 bits. The link is
paced so that one such pass takes 100 times a step of level 1 over one token.

1. acceptance of level 1, and tokens per pass, on the same text and coins: with exact weights (all
   of them resident: more memory), with copies of what streams, and with copies of all layers.
2. seconds per token over the same link, medians over the prompts: triforce; autoregressive and
   speculative (n-grams) with the same layers on the device; and both in the same memory, where
   exact layers take the place of the copies.

    python scripts/bench_substitutes.py [--prompts 3]

Prints tables and writes benchmarks/results/bench_substitutes.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from typing import Any

from bench_triforce import step_and_pass, workload
from material import model_file, stretches
from results import write_result
from rich.console import Console
from rich.table import Table
from workloads import generate_fully

from offload.placement import Placement, device_bytes, spread
from triforce_core import Engine
from triforce_core.model.tokenizer import load_tokenizer

RESULT = "bench_substitutes"
RATIO = 100
# Each method generates so many: a token of `autoregressive` is a pass, and all passes take the same
# time.
NEW_TOKENS = {"autoregressive": 2, "speculative": 6, "triforce": 97}
RESIDENT = 10
# Enough text to tell acceptances apart.
ACCEPTANCE_TOKENS = 193


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=1500, help="prompt length")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--budget", type=int, default=512, help="of the retrieval cache")
    parser.add_argument("--drafts", type=int, default=24, help="draft length of acceptances")
    args = parser.parse_args()
    bench = SubstitutesBench(args.tokens, args.prompts, args.budget)
    step_seconds, pass_bytes = bench.calibrate()
    bandwidth = pass_bytes / (RATIO * step_seconds)
    exact_alone = replace(bench.placement, substituted_layers=())
    record: dict[str, Any] = {
        **workload(args, "bfloat16"),
        "device_memory_bytes": bench.device_bytes,
        "level_1_step_seconds": step_seconds,
        "bytes_per_pass": pass_bytes,
        "link_bytes_per_second": bandwidth,
        "methods": {},
        "acceptance": {},
    }
    for name, method, options in (
        ("triforce", "triforce", {"placement": bench.placement}),
        ("autoregressive, the same layers", "autoregressive", {"placement": exact_alone}),
        ("speculative, the same layers", "speculative", {"placement": exact_alone}),
        ("autoregressive, the same memory", "autoregressive", bench.same_memory),
        ("speculative, the same memory", "speculative", bench.same_memory),
    ):
        row = bench.measure(bandwidth, method, **options)
        record["methods"][name] = row
        # An hour in all: what was measured is kept, whatever ends it.
        path = write_result(RESULT, record)
        print(f"{name}: {row['seconds_per_token']:.3f} s/token", flush=True)
    for name, options in (
        ("exact", {"draft_weights": "exact"}),
        ("4 bits of what streams", {"placement": bench.placement}),
        ("4 bits of all", {"draft_weights": "int4"}),
    ):
        row = bench.acceptance(args.drafts, **options)
        record["acceptance"][name] = row
        path = write_result(RESULT, record)
        print(f"{name}: {row['acceptance']:.3f} accepted", flush=True)
    own = record["methods"]["triforce"]["seconds_per_token"]
    record["ratios"] = {
        f"times {name}": row["seconds_per_token"] / own
        for name, row in record["methods"].items()
        if name != "triforce"
    }
    record["ratios"]["acceptance of that with exact weights"] = (
        record["acceptance"]["4 bits of what streams"]["acceptance"]
        / record["acceptance"]["exact"]["acceptance"]
    )
    path = write_result(RESULT, record)
    show(record["acceptance"], record["methods"], record["ratios"])
    print(f"written to {os.path.relpath(path)}")


class SubstitutesBench:
    """The prompts, and engines of one size of memory over links of different speeds."""

    def __init__(self, tokens: int, prompts: int, budget: int) -> None:
        self._tokenizer = load_tokenizer(model_file())
        self._prompts = stretches(self._tokenizer, prompts, tokens)
        self._tokens = tokens
        self._budget = budget
        # One size of context, so one size of everything.
        self._context = tokens + max(ACCEPTANCE_TOKENS, *NEW_TOKENS.values())
        with self._engine(None, draft_weights="int4") as engine:
            demand = engine.runtime.demand
        streamed = tuple(set(range(demand.layers)) - set(spread(RESIDENT, demand.layers)))
        self.placement = Placement(
            tuple(sorted(streamed)), True, demand.kv_blocks, 2, 3, 2, 0, tuple(sorted(streamed))
        )
        self.device_bytes = device_bytes(demand, self.placement)
        self.same_memory = {"device_memory": self.device_bytes}

    def acceptance(self, drafts: int, **options: Any) -> dict[str, Any]:
        """Of level 1 by the target: accepted tokens of those examined."""
        runs = []
        options |= {"draft": "none", "draft_tokens": drafts}
        with self._engine(None, **options) as engine:
            for seed, prompt in enumerate(self._prompts):
                stats = generate_fully(engine, prompt, ACCEPTANCE_TOKENS, seed)
                lengths = stats["acceptance"]["accepted_lengths"]
                accepted = sum(i * n for i, n in enumerate(lengths))
                runs.append((accepted, accepted + sum(lengths[:drafts]), stats))
        last = runs[-1][2]
        return {
            "acceptance": sum(r[0] for r in runs) / sum(r[1] for r in runs),
            "each": [accepted / examined for accepted, examined, _ in runs],
            "tokens_per_pass": sum(r[2]["new_tokens"] - 1 for r in runs)
            / sum(r[2]["passes"] for r in runs),
            "levels": last["levels"],
            "placement": last["placement"],
        }

    def calibrate(self) -> tuple[float, float]:
        """Seconds of one step of level 1 over one token, and bytes of one pass."""
        options = {"draft": "none", "draft_tokens": 24, "placement": self.placement}
        with self._engine(None, **options) as engine:
            return step_and_pass(engine, self._prompts[0], 40)

    def measure(self, bandwidth: float, method: str, **options: Any) -> dict[str, Any]:
        runs, new_tokens = [], NEW_TOKENS[method]
        with self._engine(bandwidth, method=method, **options) as engine:
            for seed, prompt in enumerate(self._prompts):
                stats = generate_fully(engine, prompt, new_tokens, seed)
                runs.append(
                    {
                        "seconds_per_token": stats["seconds_per_token"],
                        "tokens_per_pass": stats["tokens_per_pass"],
                        "passes": stats["passes"],
                        "seconds": stats["seconds"],
                        "acceptance": stats["acceptance"]["target"],
                        "draft_tokens": stats["draft_tokens"],
                    }
                )
        return {
            "seconds_per_token": statistics.median(run["seconds_per_token"] for run in runs),
            "tokens_per_pass": statistics.median(run["tokens_per_pass"] for run in runs),
            "levels": stats["levels"],
            "placement": stats["placement"],
            "runs": runs,
        }

    def _engine(self, bandwidth: float | None, **options: Any) -> Engine:
        if options.get("method", "triforce") == "triforce":
            options["budget"] = self._budget
        return Engine.from_pretrained(
            model_file(),
            device="cpu",
            dtype="bfloat16",
            weights="dense",
            link_bandwidth=bandwidth,
            max_context=self._context,
            tokenizer=self._tokenizer,
            **options,
        )


def show(acceptance: dict, methods: dict, ratios: dict) -> None:
    table = Table("level 1", "acceptance", "tokens/pass", "layers in 4 bits")
    for name, row in acceptance.items():
        count = str(row["placement"]["substituted_layers"])
        tokens = f"{row['tokens_per_pass']:.1f}"
        table.add_row(name, f"{row['acceptance']:.3f}", tokens, count)
    Console().print(table)
    columns = ("s/token", "tokens/pass", "resident layers", "levels")
    table = Table(f"EMULATED link, {RATIO}:1", *columns)
    for name, row in methods.items():
        resident = str(row["placement"]["resident_weight_layers"])
        table.add_row(
            name,
            f"{row['seconds_per_token']:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            resident,
            " > ".join(row["levels"]),
        )
    Console().print(table)
    for name, ratio in ratios.items():
        print(f"{ratio:.2f} {name}")


if __name__ == "__main__":
    main()
