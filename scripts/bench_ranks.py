"""Seconds per pass on one rank and on two, each with an EMULATED link of its own.

A random Llama whose heads divide, 4,000 tokens, one token a pass, KV or weights or both streamed.
The links are so slow that they dominate: two ranks have half of the bytes each, and sums over ranks
(gloo, on the CPU) besides. Each pass is held against what the planner predicts of it, with rates of
a probe and a sum timed in the same run.

    python scripts/bench_ranks.py [--tokens 4000] [--link 100MB/s] [--passes 4]

Prints a table and writes benchmarks/results/bench_ranks.json and docs/trace_ranks.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from predicted import compare
from results import write_result
from rich.console import Console
from rich.table import Table
from trace_file import read_trace

from offload.formats import DTYPES
from offload.machine.probe import Rates, emulated, measure_cpu
from offload.placement import Placement
from offload.units import parse_bandwidth
from triforce_core import Engine, SamplingParams
from triforce_core.model.shapes import read_shape
from triforce_core.model.tensors import matrices
from triforce_core.planner.case import Case
from triforce_core.planner.round_cost import RoundCost

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
ALL = 10**6
SUMS = (1, 1 << 20)
EVERY = tuple(range(LAYERS))
PLACEMENTS = {
    "KV": Placement((), True, 0, 0, 3, 2),
    "weights": Placement(EVERY, True, ALL, 2, 0, 0),
    "both": Placement(EVERY, True, 0, 2, 3, 2),
}
PICTURE = Path(__file__).parent.parent / "docs" / "trace_ranks.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=4000, help="prompt length")
    parser.add_argument("--link", type=parse_bandwidth, default=parse_bandwidth("100MB/s"))
    parser.add_argument("--passes", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model = Path(root, "model")
        make_model(model)
        # Ranks have one processor each, and so has the one that is alone.
        torch.set_num_threads(1)
        rates = measure_cpu(matrices(read_shape(str(model))))
        sums = seconds_of_sums()
        record: dict[str, Any] = {
            "link": "emulated, one a rank",
            "link_bytes_per_second": args.link,
            "model": f"random Llama, {LAYERS} layers of 512, 8 heads over 4, float32",
            "tokens": args.tokens,
            "threads_of_a_rank": 1,
            "seconds_of_a_sum_of_numbers": sums,
            "streamed": {},
        }
        trace = Path(root, "trace.json")
        for streamed, placement in PLACEMENTS.items():
            ranks = {}
            for count in (1, 2):
                keep = trace if (streamed, count) == ("both", 2) else None
                ranks[count] = measure(model, placement, count, args, rates, sums, keep)
            one, two = (ranks[count]["seconds_per_pass"]["measured"] for count in (1, 2))
            record["streamed"][streamed] = {"ranks": ranks, "two_of_one": two / one}
        path = write_result("bench_ranks", record)
        draw(trace)
    show(record)
    print(f"written to {os.path.relpath(path)}")


def make_model(directory: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, eos_token_id=None, bos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def measure(
    model: Path,
    placement: Placement,
    count: int,
    args: argparse.Namespace,
    rates: Rates,
    sums: dict[int, float],
    trace: Path | None,
) -> dict[str, Any]:
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
        hardware = replace(
            emulated(rates, args.link),
            gpus=count,
            all_reduce_seconds=each,
            all_reduce_bytes_per_second=4 * SUMS[1] / max(many - each, 1e-9),
        )
        case = Case(engine.config, hardware, args.tokens + 64, 1, dtype=DTYPES["float32"])
        demand = engine.runtime.demand
        cost = RoundCost(case.costs, demand, engine.runtime.placement, args.tokens, 1)
        # The head is computed after the next pass's copies have begun.
        predicted = replace(cost, early_head=True).seconds
        last = runs[-1]
        link = last["link"]
        alone = link["floor_seconds_per_pass"] * link["bandwidth_gb_per_s"] * 1e9
        sent = [rank["bytes_per_pass"] for rank in last.get("ranks", ())]
        return {
            "seconds_per_pass": compare(predicted, seconds),
            "bytes_per_pass": sent or [alone],
        }


def seconds_of_sums() -> dict[int, float]:
    """Of one number and of a million, over two processes."""
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
        part, taken = torch.zeros(numbers), []
        for _ in range(40):
            began = time.perf_counter()
            dist.all_reduce(part)
            taken.append(time.perf_counter() - began)
        found[numbers] = statistics.median(taken)
    if rank == 0:
        Path(root, "seconds.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


def draw(trace: Path) -> None:
    """The last two passes of a run."""
    steps = [event for event in read_trace(trace)["host, rank 0"] if event.name == "step"]
    window = ("--begin", str(steps[-2].began), "--end", str(steps[-1].ended))
    script = Path(__file__).with_name("plot_trace.py")
    subprocess.run([sys.executable, *map(str, (script, trace, PICTURE)), *window], check=True)


def show(record: dict[str, Any]) -> None:
    columns = ("streamed", "one rank, s/pass", "two ranks", "of one", "predicted of measured")
    table = Table(*columns, title="EMULATED links")
    for streamed, row in record["streamed"].items():
        passes = [row["ranks"][count]["seconds_per_pass"] for count in (1, 2)]
        table.add_row(
            streamed,
            *(f"{it['measured']:.3f}" for it in passes),
            f"{row['two_of_one']:.3f}",
            ", ".join(f"{it['ratio']:.3f}" for it in passes),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
