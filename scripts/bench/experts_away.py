"""Decoding with the experts of all layers in host memory: streamed, or computed by the processor.

A random model with experts over an EMULATED link: whole layers stream, or the experts alone; and
the processor computes whole layers, or the experts alone, or those that are in no pool on the
device. It reads the experts that a token chooses; the link brings all. On a CPU the device is the
processor too, so pools cannot be faster here: the benchmark shows what they cost, and what they
had of the experts that a text of this model chose. Ways take turns within each round; the texts
must be equal.

    python scripts/bench experts_away [--bandwidth 2e9] [--rounds 3]

Writes benchmarks/results/bench_experts_away.json. Exits with 1 if a text differs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch

from bench.hybrid import MODELS, made
from frame import Benchmark, Figures, Option
from triforce_core import Engine, SamplingParams
from triforce_offload.plan.placement import Placement

LAYERS = tuple(range(8))
SIZES = {"hidden_size": 512, "num_experts": 64, "num_experts_per_tok": 4}
SIZES |= {"moe_intermediate_size": 256}
STREAMED = Placement(LAYERS, True, 10**6, 2, 0, 0)
APART = replace(STREAMED, expert_layers=LAYERS)
WAYS = {
    "layers stream": STREAMED,
    "experts stream": APART,
    "the processor computes layers": replace(STREAMED, processor_layers=LAYERS),
    "the processor computes experts": replace(APART, processor_layers=LAYERS),
    "pools of a quarter": replace(APART, processor_layers=LAYERS, expert_slots=16),
}
PROMPT_TOKENS = 500


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {
        "model": "random, float32: 8 layers of 64 experts, of which a token chooses 4",
        "link": "emulated",
        "bandwidth_gb_per_s": args.bandwidth / 1e9,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
    }
    with tempfile.TemporaryDirectory() as directory:
        made("Qwen3Moe", MODELS["Qwen3Moe"] | SIZES, directory)
        yield compared(directory, args)


def compared(directory: str, args: argparse.Namespace) -> Figures:
    """Return the seconds of a pass in each way."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1000, (PROMPT_TOKENS,), generator=generator).tolist()
    params = SamplingParams(args.new_tokens, temperature=0)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    texts, crossed, pools = {}, {}, {}
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(
                Engine.from_pretrained(
                    directory,
                    device="cpu",
                    dtype="float32",
                    method="autoregressive",
                    max_context=PROMPT_TOKENS + args.new_tokens,
                    link_bandwidth=args.bandwidth,
                    placement=placement,
                )
            )
            for way, placement in WAYS.items()
        }
        for each in engines.values():
            each.generate(prompt, SamplingParams(2, temperature=0))
        for _ in range(args.rounds):
            for way, each in engines.items():
                result = each.generate(prompt, params)
                taken[way].append(result.stats["seconds"]["decode"] / result.stats["passes"])
                texts[way] = result.token_ids
                crossed[way] = each.memory_plan.link_bytes
                if experts := result.stats["experts"]:
                    pools = experts | {"passes": result.stats["passes"]}
    median = {way: statistics.median(seconds) for way, seconds in taken.items()}
    first = next(iter(WAYS))
    return {
        "link_bytes": crossed,
        "median": median,
        "of_streamed_layers": {way: seconds / median[first] for way, seconds in median.items()},
        "pools": pools,
        "all": taken,
        "faults": [f"the text differs where {way}" for way in WAYS if texts[way] != texts[first]],
    }


main = Benchmark(
    __doc__,
    "bench_experts_away",
    measure,
    (
        Option("--new-tokens", 24, "tokens that are generated"),
        Option("--rounds", 3, "runs of each way, in turns"),
        Option("--bandwidth", 2e9, "bytes per second of the link"),
    ),
)
