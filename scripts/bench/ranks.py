"""Seconds per pass on one rank and on two, each with an EMULATED link of its own.

A random Llama whose heads divide evenly, 4,000 tokens, one token per pass, with KV, weights or both
streamed. The links are so slow that they dominate: two ranks move half of the bytes each, and add
their sums (gloo, on the CPU). Each pass is compared with the planner's prediction, with rates of a
probe and an all-reduce timed in the same run.

    python scripts/bench ranks [--tokens 4000] [--link 100MB/s] [--passes 4]

Writes benchmarks/results/bench_ranks.json; with --plot, docs/trace_ranks.png too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from bench.placements import ALL
from bench.plot_trace import draw, read_trace
from bench.predicted import Predicted, compare
from frame import ROOT, Benchmark, Figures, Option, timed
from triforce_core import Engine
from triforce_core.params import SamplingParams
from triforce_offload.plan.placement import Placement
from triforce_offload.units import parse_bandwidth

LAYERS = 16
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
SUMS = (1, 1 << 20)
EVERY = tuple(range(LAYERS))
PLACEMENTS = {
    "KV": Placement((), True, 0, 0, 3, 2),
    "weights": Placement(EVERY, True, ALL, 2, 0, 0),
    "both": Placement(EVERY, True, 0, 2, 3, 2),
}
PICTURE = ROOT / "docs" / "trace_ranks.png"


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    with tempfile.TemporaryDirectory() as root:
        model = Path(root, "model")
        make_model(model)
        # Each of two ranks has one processor, so a single rank gets one too.
        torch.set_num_threads(1)
        predicted = Predicted.now(str(model))
        sums = seconds_of_sums()
        yield {
            "link": "emulated, one a rank",
            "link_bytes_per_second": args.link,
            "model": f"random Llama, {LAYERS} layers of 512, 8 heads over 4, float32",
            "tokens": args.tokens,
            "threads_of_a_rank": 1,
            "seconds_of_a_sum_of_numbers": sums,
        }
        trace = Path(root, "trace.json")
        for streamed, placement in PLACEMENTS.items():
            ranks = {}
            for count in (1, 2):
                keep = trace if (streamed, count) == ("both", 2) else None
                ranks[count] = passes(model, placement, count, args, predicted, sums, keep)
            one, two = (each["seconds_per_pass"]["measured"] for each in ranks.values())
            yield {"streamed": {streamed: {"ranks": ranks, "two_of_one": two / one}}}
        if args.plot:
            # The last two passes.
            steps = [event for event in read_trace(trace)["host, rank 0"] if event.name == "step"]
            draw(trace, PICTURE, steps[-2].began, steps[-1].ended)


def make_model(directory: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, eos_token_id=None, bos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def passes(
    model: Path,
    placement: Placement,
    count: int,
    args: argparse.Namespace,
    predicted: Predicted,
    sums: dict[int, float],
    trace: Path | None,
) -> Figures:
    """Measure the seconds and bytes of a pass on `count` ranks, beside the planner's prediction."""
    tokens = torch.randint(32000, (args.tokens,), generator=torch.Generator().manual_seed(0))
    with Engine.from_pretrained(
        model,
        device="cpu",
        dtype="float32",
        gpus=count,
        threads=1,
        link_bandwidth=args.link,
        max_context=args.tokens + 64,
        method="autoregressive",
        placement=placement,
        trace=trace,
    ) as engine:
        params = SamplingParams(args.passes + 1, temperature=0)
        engine.generate(tokens[:200].tolist(), params)
        runs = [engine.generate(tokens.tolist(), params).stats for _ in range(2)]
        seconds = statistics.median(run["seconds_per_token"] for run in runs)
        each, many = sums.values()
        expected = predicted.a_pass(
            engine, args.link, args.tokens, 1, early_head=True, gpus=count,
            all_reduce_seconds=each,
            all_reduce_bytes_per_second=4 * SUMS[1] / max(many - each, 1e-9),
        )  # fmt: skip
        last = runs[-1]
        link = last["link"]
        alone = link["floor_seconds_per_pass"] * link["bandwidth_gb_per_s"] * 1e9
        sent = [rank["bytes_per_pass"] for rank in last.get("ranks", ())]
        return {
            "seconds_per_pass": compare(expected, seconds),
            "bytes_per_pass": sent or [alone],
        }


def seconds_of_sums() -> dict[int, float]:
    """Time the sum of one number and of a million, over two processes."""
    with tempfile.TemporaryDirectory() as root:
        torch.multiprocessing.spawn(_time_sums, (root,), nprocs=2)
        told = json.loads(Path(root, "seconds.json").read_text("utf-8"))
    return {int(numbers): seconds for numbers, seconds in told.items()}


def _time_sums(rank: int, root: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(root, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for numbers in SUMS:
        part = torch.zeros(numbers)
        found[numbers] = statistics.median(
            timed(lambda part=part: dist.all_reduce(part)) for _ in range(40)
        )
    if rank == 0:
        Path(root, "seconds.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


main = Benchmark(
    __doc__,
    "bench_ranks",
    measure,
    (
        Option("--tokens", 4000, "tokens of the prompt"),
        Option("--link", parse_bandwidth("100MB/s"), "of each rank", type=parse_bandwidth),
        Option("--passes", 4, "passes of a run"),
        Option("--plot", False, "draw docs/trace_ranks.png"),
    ),
)
