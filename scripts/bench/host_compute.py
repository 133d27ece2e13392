"""Plain decoding while weights stream and the processor computes a share of their layers.

SmolLM2-135M after a part of the Python manual, all layers streamed over an EMULATED link. On a CPU
the device is the processor too, so only the link's part of a pass can become shorter. Shares take
turns within each round; the texts must be equal.

    python scripts/bench host_compute [--bandwidth 2e9] [--rounds 3]

Writes benchmarks/results/bench_host_compute.json. Exits with 1 if a text differs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace

from bench.placements import LAYERS, WEIGHTS_STREAMED
from bench.workloads import MODEL, engine, greedy, stretches
from frame import Benchmark, Figures, Option
from triforce_core import Engine
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import spread

# How the weights are kept: bytes per number fall from 4 to 5 / 8.
FORMATS = {"float32": "dense", "bfloat16": "dense", "Q4_1": "stored"}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    (prompt,) = stretches(1, args.tokens)
    yield {
        "model": f"{MODEL} float32, as bfloat16 and as stored",
        "link": "emulated",
        "bandwidth_gb_per_s": args.bandwidth / 1e9,
        "prompt_tokens": len(prompt),
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
    }
    for name in args.formats:
        yield {"seconds_per_pass": {name: compared(args, name, prompt)}}


def compared(args: argparse.Namespace, name: str, prompt: list[int]) -> Figures:
    """Return the seconds of a pass with each share, and of resident weights."""
    engines = {
        "resident": opened(args, name, replace(WEIGHTS_STREAMED, streamed_layers=())),
        **{
            f"{share:g}": opened(args, name, shared(share))
            for share in (0.0, *(share for share in args.shares if share))
        },
    }
    taken: dict[str, list[float]] = {which: [] for which in engines}
    texts = {}
    try:
        for which, each in engines.items():
            texts[which] = each.generate(prompt, greedy(2)).token_ids
        for _ in range(args.rounds):
            for which, each in engines.items():
                result = each.generate(prompt, greedy(args.new_tokens))
                stats = result.stats
                taken[which].append(stats["seconds"]["decode"] / stats["passes"])
                texts[which] = result.token_ids
        plan = engines["0"].memory_plan
    finally:
        for each in engines.values():
            each.close()
    median = {which: statistics.median(seconds) for which, seconds in taken.items()}
    streamed = median["0"]
    return {
        "streamed_bytes": plan.weights_link_bytes,
        "median": median,
        "of_streamed": {which: seconds / streamed for which, seconds in median.items()},
        "all": taken,
        "faults": [
            f"{name}: the text with {which} differs"
            for which, text in texts.items()
            if text != texts["0"]
        ],
    }


def shared(share: float) -> Placement:
    """Return the placement in which the processor computes a share of all layers."""
    count = round(share * len(LAYERS))
    return replace(WEIGHTS_STREAMED, processor_layers=spread(count, len(LAYERS)) if count else ())


def opened(args: argparse.Namespace, name: str, placement: Placement) -> Engine:
    dtype = "float32" if FORMATS[name] == "stored" else name
    return engine(
        args.tokens + args.new_tokens,
        link_bandwidth=args.bandwidth,
        placement=placement,
        method="autoregressive",
        weights=FORMATS[name],
        dtype=dtype,
    )


main = Benchmark(
    __doc__,
    "bench_host_compute",
    measure,
    (
        Option("--tokens", 500, "tokens of the prompt"),
        Option("--new-tokens", 40, "tokens that are generated"),
        Option("--rounds", 3, "runs of each share, in turns"),
        Option("--bandwidth", 2e9, "bytes per second of the link"),
        Option("--shares", [0.25, 0.5, 0.75, 1.0], "shares of the layers"),
        Option("--formats", list(FORMATS), "formats of the weights", choices=list(FORMATS)),
    ),
)
