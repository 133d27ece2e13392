"""How much a model accepts of what it drafts itself with its weights and its KV read cheaply: by
the upper planes, in 4-bit groups, exactly; and at which rate planes are encoded and decoded.

SmolLM2-135M in bfloat16, made of its Q4_1 file, over stretches of the Python manual, temperature
0.6, top-p 0.9. The retrieval cache holds the whole text but in the last row: what is rejected is
the doing of what is read. No figure of acceptance depends on the machine's speed.

    python scripts/bench_planes.py [--tokens 6000] [--stretches 3]

Prints a table and writes benchmarks/results/bench_planes.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from unittest.mock import patch

import torch
from bench_acceptance import measure
from material import model_file, stretches
from results import write_result
from rich.console import Console
from rich.table import Table
from triforce_kernels.kv_planes import KVPlanes
from triforce_kernels.plane_codes import middle_bits
from triforce_kernels.planes import decode, encode
from triforce_kernels.upper import UpperWeight
from triforce_kernels.upper import decode as decode_upper

from offload.kv.block_format import PlaneBlocks
from offload.kv.shape import KVShape
from triforce_core.model.tokenizer import load_tokenizer


class Reading(NamedTuple):
    """What is read to draft. bits: of each number of what is read otherwise than exactly

    upper_kv: whether the chunks of KV are read by their upper planes alone, which an engine has no
        option for. share: of the text that the retrieval cache holds
    """

    options: dict[str, str]
    bits: float
    upper_kv: bool = False
    share: float = 1.0


READINGS = {
    "exact": Reading({"weights": "planes", "draft_weights": "exact"}, 16),
    "weights by upper planes": Reading({"weights": "planes", "draft_weights": "planes"}, 8),
    "weights in 4-bit groups of 64": Reading({"weights": "planes", "draft_weights": "int4"}, 4.5),
    "dense weights, KV exactly": Reading({"weights": "dense", "kv": "planes"}, 16),
    "KV by upper planes": Reading({"weights": "dense", "kv": "planes"}, 8, upper_kv=True),
    "both by upper planes": Reading(
        {"weights": "planes", "draft_weights": "planes", "kv": "planes"}, 8, upper_kv=True
    ),
    "KV in 8 bits": Reading({"weights": "dense", "draft_kv": "int8"}, 8),
    "weights by upper planes, KV in 8 bits": Reading(
        {"weights": "planes", "draft_weights": "planes", "draft_kv": "int8"}, 8
    ),
    "float16, weights by upper bytes": Reading(
        {"dtype": "float16", "weights": "planes", "draft_weights": "planes"}, 8
    ),
    "float32, KV in 8 bits": Reading({"dtype": "float32", "draft_kv": "int8"}, 8),
    "KV exactly, half of the text": Reading({"weights": "dense", "kv": "planes"}, 16, share=0.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=6000, help="prompt length")
    parser.add_argument("--new-tokens", type=int, default=160, help="generated from each stretch")
    parser.add_argument("--stretches", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=24)
    parser.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS))
    parser.add_argument("--no-rates", action="store_true", help="acceptance alone")
    parser.add_argument("--result", default="bench_planes")
    args = parser.parse_args()
    args.task = "continuation"
    tokenizer = load_tokenizer(model_file())
    prompts = stretches(tokenizer, args.stretches, args.tokens)
    figures = {}
    for name in args.readings:
        reading = READINGS[name]
        whole = args.tokens + args.new_tokens
        args.budget = 8 * -(-int(whole * reading.share) // 8)
        options = {"dtype": "bfloat16"} | reading.options
        with upper_kv() if reading.upper_kv else nullcontext():
            row = measure(args, options, prompts, tokenizer)
        figures[name] = row | {"bits": reading.bits, "budget": args.budget}
        print(f"{name}: {row['acceptance']:.3f}, {row['expected_acceptance']:.4f}", flush=True)
    rates = {} if args.no_rates else codec_rates()
    path = write_result(
        args.result,
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
    columns = ("bits", "acceptance", "expected", "tokens per pass", "per stretch")
    table = Table("what drafts reads", *columns)
    for name, row in figures.items():
        each = " ".join(f"{run['acceptance']:.3f}" for run in row["runs"])
        table.add_row(
            name,
            str(row["bits"]),
            f"{row['acceptance']:.3f}",
            f"{row['expected_acceptance']:.4f}",
            f"{row['tokens_per_pass']:.2f}",
            each,
        )
    Console().print(table)
    print(", ".join(f"{name} {rate:.0f} MB/s" for name, rate in rates.items()))
    print(f"written to {os.path.relpath(path)}")


@contextmanager
def upper_kv() -> Iterator[None]:
    """Inside, chunks of blocks in planes are read by their upper planes alone."""

    def decode_upper_chunks(
        planes: KVPlanes, heads: torch.Tensor, chunks: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        both, whole, head_dim = planes.shape
        in_chunks = planes.upper.view(2, both // 2, whole // tokens, tokens, head_dim)
        base = planes.base.view(2, both // 2, 1, head_dim)[:, heads]
        return middle_bits(in_chunks[:, heads, chunks], base).view(torch.bfloat16)

    with patch("offload.kv.block_format.decode_chunks", decode_upper_chunks):
        yield


def codec_rates() -> dict[str, float]:
    """Megabytes of dense bfloat16 a second, of one thread, medians of 9."""
    torch.set_num_threads(1)
    matrix = torch.randn(3072, 2048, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    matrix = matrix.bfloat16()
    weight = encode(matrix)
    parts = [weight.rows(i, i + 256) for i in range(0, 3072, 256)]

    block = matrix[:, :1536].reshape(6, 8192, 96)[:, :, :64].contiguous()
    shape = KVShape(1, 3, 64, 8192, torch.bfloat16, in_planes=True)
    scratch = torch.empty(shape.dense_block_bytes, dtype=torch.uint8)
    blocks = PlaneBlocks(shape, scratch)
    coded = torch.empty(shape.block_bytes, dtype=torch.uint8)
    keys_values = block.view(2, 3, 8192, 64)

    def rate(run: Callable[[], object], numbers: int = matrix.numel()) -> float:
        seconds = []
        for _ in range(9):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        return 2e-6 * numbers / statistics.median(seconds)

    return {
        "encode": rate(lambda: encode(matrix)),
        "decode": rate(lambda: [decode(part) for part in parts]),
        "decode upper planes": rate(lambda: [decode_upper(UpperWeight.of(p)) for p in parts]),
        "encode KV": rate(lambda: blocks.write(coded, keys_values), block.numel()),
        "decode KV": rate(lambda: blocks.read(coded), block.numel()),
    }


if __name__ == "__main__":
    main()
