"""Plain decoding of SmolLM2-135M after 6,000 tokens of the Python manual, float32.

1. Everything resident: seconds per token and of prefill against transformers `generate`, in turns
   in the same run.
2. KV, weights, or both streamed over an EMULATED link slow enough to dominate: seconds per pass
   against the link's floor, bytes per pass / bandwidth.

    python scripts/bench_decode.py [--tokens 6000] [--repeats 3]

Prints a table and writes benchmarks/results/bench_decode.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
from material import manual, model_file
from results import write_result
from rich.console import Console
from rich.table import Table

from offload.placement import Placement
from triforce_core import Engine, SamplingParams

ALL = 10**9
LAYERS = tuple(range(30))
STREAMED = {
    "KV streamed": (Placement((), True, 0, 0, 3, 2), 0.5e9),
    "weights streamed": (Placement(LAYERS, True, ALL, 2, 0, 0), 0.5e9),
    "both streamed": (Placement(LAYERS, True, 0, 2, 3, 2), 1.0e9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=6000, help="prompt length")
    parser.add_argument("--new-tokens", type=int, default=32, help="generated when resident")
    parser.add_argument("--passes", type=int, default=10, help="measured when streamed")
    parser.add_argument("--repeats", type=int, default=3, help="of each side, in turns")
    args = parser.parse_args()

    resident, prompt, tokenizer = compare_resident(args)
    streamed = {
        name: measure_streamed(prompt, tokenizer, placement, bandwidth, args.passes)
        for name, (placement, bandwidth) in STREAMED.items()
    }
    path = write_result(
        "bench_decode",
        {
            "model": "SmolLM2-135M-Instruct.Q4_1 as float32",
            "prompt_tokens": len(prompt),
            "resident": resident,
            "emulated_link": streamed,
        },
    )
    print_tables(resident, streamed)
    print(f"written to {os.path.relpath(path)}")


def compare_resident(args: argparse.Namespace) -> tuple[dict[str, Any], list[int], Any]:
    """Ours and transformers in turns, on the same prompt, both with everything resident."""
    from transformers import AutoModelForCausalLM

    path = model_file()
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, trust_remote_code=False, gguf_file=path.name, dtype=torch.float32
    ).eval()
    seconds: dict[str, dict[str, list[float]]] = {
        side: {"prefill": [], "per_token": []} for side in ("ours", "transformers")
    }
    texts = set()
    with Engine.from_pretrained(
        path,
        device="cpu",
        method="autoregressive",
        weights="dense",
        max_context=args.tokens + args.new_tokens,
    ) as ours:
        tokenizer = ours.tokenizer
        prompt = tokenizer.encode(manual(5 * args.tokens))[: args.tokens]
        for _ in range(args.repeats):
            tokens, prefill, per_token = time_transformers(theirs, prompt, args.new_tokens)
            record(seconds["transformers"], prefill, per_token)
            texts.add(tuple(tokens))
            result = ours.generate(prompt, greedy(args.new_tokens), reuse=False)
            stats = result.stats
            record(seconds["ours"], stats["seconds"]["prefill"], stats["seconds_per_token"])
            texts.add(tuple(result.token_ids))
    medians = {
        side: {name: statistics.median(values) for name, values in figures.items()}
        for side, figures in seconds.items()
    }
    return (
        {
            "new_tokens": args.new_tokens,
            "repeats": args.repeats,
            "same_tokens": len(texts) == 1,
            "median_seconds": medians,
            "ratio": {
                name: medians["ours"][name] / medians["transformers"][name]
                for name in ("prefill", "per_token")
            },
            "seconds": seconds,
        },
        prompt,
        tokenizer,
    )


def time_transformers(
    model: torch.nn.Module, prompt: list[int], new_tokens: int
) -> tuple[list[int], float, float]:
    """Tokens, seconds until the first and seconds per token after it, of `generate`."""
    from transformers.generation.streamers import BaseStreamer

    times: list[float] = []

    class Clock(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=Clock(),
    )
    prompt_seen, first, last = times[0], times[1], times[-1]
    return output[0, len(prompt) :].tolist(), first - prompt_seen, (last - first) / (new_tokens - 1)


def measure_streamed(
    prompt: list[int], tokenizer: Any, placement: Placement, bandwidth: float, passes: int
) -> dict[str, Any]:
    """Seconds per pass over an emulated link, against its floor."""
    with Engine.from_pretrained(
        model_file(),
        device="cpu",
        method="autoregressive",
        weights="dense",
        link_bandwidth=bandwidth,
        max_context=len(prompt) + passes + 1,
        placement=placement,
        tokenizer=tokenizer,
    ) as engine:
        stats = engine.generate(prompt, greedy(passes + 1)).stats
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


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=0)


def record(seconds: dict[str, list[float]], prefill: float, per_token: float) -> None:
    seconds["prefill"].append(prefill)
    seconds["per_token"].append(per_token)


def print_tables(resident: dict[str, Any], streamed: dict[str, Any]) -> None:
    console = Console()
    table = Table("everything resident", "prefill s", "s/token")
    for side, figures in resident["median_seconds"].items():
        table.add_row(side, f"{figures['prefill']:.2f}", f"{figures['per_token']:.4f}")
    table.add_row("ratio", *(f"{resident['ratio'][n]:.3f}" for n in ("prefill", "per_token")))
    console.print(table)
    table = Table("EMULATED link", "GB/s", "MB/pass", "floor s/pass", "s/pass", "ratio")
    for name, row in streamed.items():
        table.add_row(
            name,
            f"{row['bandwidth_gb_per_s']:.2f}",
            f"{row['bytes_per_pass'] / 1e6:.1f}",
            f"{row['floor_seconds_per_pass']:.4f}",
            f"{row['seconds_per_pass']:.4f}",
            f"{row['ratio_to_floor']:.3f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
