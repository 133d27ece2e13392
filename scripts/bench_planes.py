"""How much a model accepts of what it drafts itself with its weights read cheaply: by the upper
planes, in 4-bit groups, exactly; and at which rate planes are encoded and decoded.

SmolLM2-135M in bfloat16, made of its Q4_1 file, over stretches of the Python manual, temperature
0.6, top-p 0.9. The retrieval cache holds the whole text: what is rejected is the weights' doing. No
figure of acceptance depends on the machine's speed.

    python scripts/bench_planes.py [--tokens 6000] [--stretches 3]

Prints a table and writes benchmarks/results/bench_planes.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from bench_acceptance import measure
from material import model_file, stretches
from results import write_result
from rich.console import Console
from rich.table import Table
from triforce_kernels.planes import decode, encode
from triforce_kernels.upper import UpperWeight
from triforce_kernels.upper import decode as decode_upper

from triforce_core.model.tokenizer import load_tokenizer

# Weights, what is read of them to draft, and its bits a number.
READINGS = (
    ("exact", {"weights": "planes", "draft_weights": "exact"}, 16),
    ("upper planes", {"weights": "planes", "draft_weights": "planes"}, 8),
    ("4-bit groups of 64", {"weights": "planes", "draft_weights": "int4"}, 4.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6000, help="prompt length")
    parser.add_argument("--new-tokens", type=int, default=160, help="generated from each stretch")
    parser.add_argument("--stretches", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=24)
    args = parser.parse_args()
    args.task, args.budget = "continuation", 8 * -(-(args.tokens + args.new_tokens) // 8)
    tokenizer = load_tokenizer(model_file())
    prompts = stretches(tokenizer, args.stretches, args.tokens)
    figures = {
        name: measure(args, options | {"dtype": "bfloat16"}, prompts, tokenizer) | {"bits": bits}
        for name, options, bits in READINGS
    }
    rates = codec_rates()
    path = write_result(
        "bench_planes",
        {
            "model": "SmolLM2-135M-Instruct.Q4_1 as bfloat16",
            "prompt_tokens": args.tokens,
            "temperature": 0.6,
            "top_p": 0.9,
            "draft_tokens": args.draft_tokens,
            "readings": figures,
            "dense_megabytes_per_second_of_one_core": rates,
        },
    )
    table = Table("weights read by", "bits", "acceptance", "tokens per pass", "per stretch")
    for name, row in figures.items():
        each = " ".join(f"{run['acceptance']:.3f}" for run in row["runs"])
        table.add_row(
            name,
            str(row["bits"]),
            f"{row['acceptance']:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            each,
        )
    Console().print(table)
    print(", ".join(f"{name} {rate:.0f} MB/s" for name, rate in rates.items()))
    print(f"written to {os.path.relpath(path)}")


def codec_rates() -> dict[str, float]:
    """Megabytes of dense bfloat16 a second, of one thread, medians of 9."""
    torch.set_num_threads(1)
    matrix = torch.randn(3072, 2048, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    matrix = matrix.bfloat16()
    weight = encode(matrix)
    parts = [weight.rows(i, i + 256) for i in range(0, 3072, 256)]

    def rate(run: Callable[[], object]) -> float:
        seconds = []
        for _ in range(9):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        return 2e-6 * matrix.numel() / statistics.median(seconds)

    return {
        "encode": rate(lambda: encode(matrix)),
        "decode": rate(lambda: [decode(part) for part in parts]),
        "decode upper planes": rate(lambda: [decode_upper(UpperWeight.of(p)) for p in parts]),
    }


if __name__ == "__main__":
    main()
