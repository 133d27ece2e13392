"""Seconds per token over an EMULATED link with split KV and with dense KV, in the same memory.

SmolLM2-135M in bfloat16, its weights on the device, after 6,000 tokens of the manual. The device
has room for a share of the dense KV, half of it by default. The link is so slow that a pass without
drafts over dense KV takes 100 times as long as a step of the retrieval level over one token. Split
blocks take three quarters of the bytes, so more of them also stay on the device.

    python scripts/bench split_kv [--prompts 6] [--new-tokens 384]
    python scripts/bench split_kv --share 0.667 --prompts 3 --result bench_split_kv_two_thirds

Writes benchmarks/results/bench_split_kv.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from bench.paced import RATIO, PacedBench, ratios_to, workload
from bench.workloads import stretches
from frame import Benchmark, Figures, Option
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import Placement

# Without drafts each token is a pass, and all passes take the same time.
PLAIN_TOKENS = 4


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    bench = PacedBench(stretches(args.prompts, args.tokens), args.new_tokens, args.budget)
    memory, placements = placed(bench, args.share)
    step_seconds, pass_bytes = bench.calibrate(kv="dense", placement=placements["dense"])
    bandwidth = pass_bytes / (RATIO * step_seconds)
    yield {
        **workload(args, "bfloat16"),
        "new_tokens": args.new_tokens,
        "share": args.share,
        "device_memory_bytes": memory,
        "retrieval_step_seconds": step_seconds,
        "dense_bytes_per_pass": pass_bytes,
        "link_bytes_per_second": bandwidth,
    }
    methods = {}
    for method, tokens, kinds in (
        ("triforce", args.new_tokens, ("split", "dense")),
        ("autoregressive", PLAIN_TOKENS, ("dense", "split")),
    ):
        for kv in kinds:
            options = {"method": method, "kv": kv, "placement": placements[kv]}
            name = f"{method}, {kv}"
            methods[name] = bench.measure(bandwidth, tokens, **options)
            yield {"methods": {name: methods[name]}}
    yield {"ratios": ratios_to("triforce, split", methods)}


def placed(bench: PacedBench, share: float) -> tuple[int, dict[str, Placement]]:
    """Return the device bytes for a share of the dense KV, and each format's placement in them."""
    with bench.engine(None, kv="dense") as engine:
        demand = engine.memory_plan.requirements
    dense = Placement((), True, int(demand.kv_blocks * share), 0, 3, 2)
    memory = MemoryPlan(demand, dense).device_bytes
    with bench.engine(None, kv="split") as engine:
        demand = engine.memory_plan.requirements
    split = replace(dense, resident_kv_blocks=0)
    spare = (memory - MemoryPlan(demand, split).device_bytes) // demand.kv.block_bytes
    split = replace(split, resident_kv_blocks=min(spare, demand.kv_blocks))
    return memory, {"dense": dense, "split": split}


main = Benchmark(
    __doc__,
    "bench_split_kv",
    measure,
    (
        Option("--tokens", 6000, "tokens of a prompt"),
        Option("--new-tokens", 384, "tokens that are generated after it"),
        Option("--prompts", 6, "number of prompts"),
        Option("--budget", 1024, "tokens of the retrieval cache"),
        Option("--share", 0.5, "of the dense KV that the device has room for"),
    ),
)
