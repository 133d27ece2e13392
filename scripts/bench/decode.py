"""Plain decoding of SmolLM2-135M after 6,000 tokens of the Python manual, float32.

1. Everything resident: seconds of prefill and per token against transformers `generate`, in turns
   in the same run.
2. KV, weights, or both streamed over an EMULATED link slow enough to dominate: seconds per pass
   against the link's floor, which is bytes per pass / bandwidth.

    python scripts/bench decode [--tokens 6000] [--repeats 3]

Writes benchmarks/results/bench_decode.json. Exits with 1 if the greedy texts differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from bench.material import model_file
from bench.placements import STREAMED
from bench.workloads import MODEL, engine, greedy, stretches
from frame import Benchmark, Figures, Option, medians
from rivals.models import Clock
from triforce_offload.plan.placement import Placement

BANDWIDTHS = {"KV streamed": 0.5e9, "weights streamed": 0.5e9, "both streamed": 1.0e9}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    (prompt,) = stretches(1, args.tokens)
    yield {"model": f"{MODEL} float32", "prompt_tokens": len(prompt)}
    yield {"resident": resident(args, prompt)}
    for name, placement in STREAMED.items():
        yield {"emulated_link": {name: streamed(prompt, placement, BANDWIDTHS[name], args.passes)}}


def resident(args: argparse.Namespace, prompt: list[int]) -> Figures:
    """Time our engine and transformers in turns on the same prompt, with everything resident."""
    from transformers import AutoModelForCausalLM

    path, count = model_file(), args.new_tokens
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, trust_remote_code=False, gguf_file=path.name, dtype=torch.float32
    ).eval()
    seconds: dict[str, Any] = {
        side: {"prefill": [], "per_token": []} for side in ("ours", "transformers")
    }
    texts = set()
    with engine(args.tokens + count, method="autoregressive") as ours:
        for _ in range(args.repeats):
            tokens, *theirs_took = time_transformers(theirs, prompt, count)
            result = ours.generate(prompt, greedy(count), reuse=False)
            stats = result.stats
            ours_took = stats["seconds"]["prefill"], stats["seconds_per_token"]
            texts |= {tuple(tokens), tuple(result.token_ids)}
            for side, took in (("ours", ours_took), ("transformers", theirs_took)):
                for name, value in zip(("prefill", "per_token"), took, strict=True):
                    seconds[side][name].append(value)
    middle = {side: medians(each) for side, each in seconds.items()}
    return {
        "new_tokens": count,
        "repeats": args.repeats,
        "same_tokens": len(texts) == 1,
        "median_seconds": middle,
        "ratio": {
            name: ours / middle["transformers"][name] for name, ours in middle["ours"].items()
        },
        "seconds": seconds,
    }


def time_transformers(
    model: torch.nn.Module, prompt: list[int], new_tokens: int
) -> tuple[list[int], float, float]:
    """Return the tokens of `generate`, the seconds to the first, and seconds per later token."""
    clock = Clock()
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
    )
    # The prompt itself comes first.
    (prompt_seen, _), (first, _), *_, (last, _) = clock.seen
    return output[0, len(prompt) :].tolist(), first - prompt_seen, (last - first) / (new_tokens - 1)


def streamed(prompt: list[int], placement: Placement, bandwidth: float, passes: int) -> Figures:
    """Time passes over an emulated link, against its floor."""
    context = len(prompt) + passes + 1
    with engine(
        context, link_bandwidth=bandwidth, placement=placement, method="autoregressive"
    ) as model:
        stats = model.generate(prompt, greedy(passes + 1)).stats
    link = stats["link"]
    per_pass = stats["seconds"]["decode"] / stats["passes"]
    return {
        "bandwidth_gb_per_s": link["bandwidth_gb_per_s"],
        "bytes_per_pass": link["bytes_to_device"] / stats["passes"],
        "passes": stats["passes"],
        "seconds_per_pass": per_pass,
        "floor_seconds_per_pass": link["floor_seconds_per_pass"],
        "ratio_to_floor": per_pass / link["floor_seconds_per_pass"],
        "device_peak_bytes": stats["memory"]["device_peak_bytes"],
    }


main = Benchmark(
    __doc__,
    "bench_decode",
    measure,
    (
        Option("--tokens", 6000, "tokens of the prompt"),
        Option("--new-tokens", 32, "tokens that are generated when all is resident"),
        Option("--passes", 10, "passes that are measured when something streams"),
        Option("--repeats", 3, "runs of each side, in turns"),
    ),
)
