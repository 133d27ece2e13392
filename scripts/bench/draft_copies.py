"""Seconds per token over an EMULATED link with device memory for a third of the exact layers.

SmolLM2-135M in bfloat16 after 1,500 tokens of the manual. A third of the layers is on the device;
the others stream in every pass, and the retrieval level computes with draft copies of them. A pass
over the link takes 100 times as long as a step of that level over one token.

1. Seconds per token, medians over the prompts: triforce; autoregressive and speculative (n-grams)
   with the same layers on the device; and both in the same memory, where exact layers take the
   place of the copies.
2. Acceptance of the retrieval level, and tokens per pass, on the same texts and coins: with exact
   weights (all resident, which takes more memory), with copies of the streamed layers in 4 and in
   3 bits, and with copies of all layers in 4 bits.

    python scripts/bench draft_copies [--prompts 3]

Writes benchmarks/results/bench_draft_copies.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from bench.acceptance import accepted
from bench.paced import RATIO, PacedBench, ratios_to, workload
from bench.workloads import stretches
from frame import Benchmark, Figures, Option
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import spread

# The number of tokens that each method generates. With `autoregressive` each token is a pass, and
# all passes take the same time.
NEW_TOKENS = {"autoregressive": 2, "speculative": 6, "triforce": 97}
RESIDENT_LAYERS = 10
# Enough tokens to distinguish acceptances.
ACCEPTANCE_TOKENS = 193
STREAMED_COPIES, EXACT = "4 bits of what streams", "exact"


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    new_tokens = max(ACCEPTANCE_TOKENS, *NEW_TOKENS.values())
    bench = PacedBench(stretches(args.prompts, args.tokens), new_tokens, args.budget)
    memory, placement = placed(bench)
    step_seconds, pass_bytes = bench.calibrate(placement=placement)
    bandwidth = pass_bytes / (RATIO * step_seconds)
    yield {
        **workload(args, "bfloat16"),
        "device_memory_bytes": memory,
        "level_1_step_seconds": step_seconds,
        "bytes_per_pass": pass_bytes,
        "link_bytes_per_second": bandwidth,
    }
    methods, acceptances = {}, {}
    exact_alone = {"placement": replace(placement, copied_layers=())}
    for name, options in (
        ("triforce", {"placement": placement}),
        ("triforce, copies in 3 bits", {"placement": placement, "copy_bits": 3}),
        ("autoregressive, the same layers", exact_alone),
        ("speculative, the same layers", exact_alone),
        ("autoregressive, the same memory", {"device_memory": memory}),
        ("speculative, the same memory", {"device_memory": memory}),
    ):
        method = name.split(",")[0]
        row = bench.measure(bandwidth, NEW_TOKENS[method], method=method, **options)
        methods[name] = row
        yield {"methods": {name: row}}
    for name, options in (
        (EXACT, {"draft_weights": "exact"}),
        (STREAMED_COPIES, {"placement": placement}),
        ("3 bits of what streams", {"placement": placement, "copy_bits": 3}),
        ("4 bits of all", {"draft_weights": "int4"}),
    ):
        options |= bench.options | {"method": "triforce", "budget": args.budget}
        row = accepted(bench.prompts, ACCEPTANCE_TOKENS, args.drafts, **options)
        acceptances[name] = row | {"each": [run["acceptance"] for run in row["runs"]]}
        yield {"acceptance": {name: acceptances[name]}}
    kept = acceptances[STREAMED_COPIES]["acceptance"] / acceptances[EXACT]["acceptance"]
    ratios = ratios_to("triforce", methods)
    yield {"ratios": ratios | {"acceptance of that with exact weights": kept}}


def placed(bench: PacedBench) -> tuple[int, Placement]:
    """Return the bytes of a placement, and the placement.

    RESIDENT_LAYERS exact layers are on the device, with draft copies of the others.
    """
    with bench.engine(None, draft_weights="int4") as engine:
        demand = engine.memory_plan.requirements
    streamed = sorted(set(range(demand.layers)) - set(spread(RESIDENT_LAYERS, demand.layers)))
    placement = Placement(
        tuple(streamed), True, demand.kv_blocks, 2, 3, 2, 0, copied_layers=tuple(streamed)
    )
    return MemoryPlan(demand, placement).device_bytes, placement


main = Benchmark(
    __doc__,
    "bench_draft_copies",
    measure,
    (
        Option("--tokens", 1500, "tokens of a prompt"),
        Option("--prompts", 3, "number of prompts"),
        Option("--budget", 512, "tokens of the retrieval cache"),
        Option("--drafts", 24, "tokens of a draft, for acceptances"),
    ),
)
