"""Seconds per token over an EMULATED link with KV in planes and with dense KV, in one memory.

SmolLM2-135M in bfloat16, its weights on the device, after 6,000 tokens of the manual. The device
has room for a share of the dense KV, half of it by default; the link is paced so that a pass
without drafts over dense KV takes 100 times a step of the retrieval model over one token. Blocks in
planes take three quarters of the bytes, so more of them stay as well: the larger the share, the
more it matters.

    python scripts/bench_kv_planes.py [--prompts 6] [--new-tokens 384]
    python scripts/bench_kv_planes.py --share 0.667 --prompts 3 --result bench_kv_planes_two_thirds

Prints a table and writes benchmarks/results/RESULT.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from typing import Any

from bench_triforce import step_and_pass, workload
from material import model_file, stretches
from results import write_result
from rich.console import Console
from rich.table import Table
from workloads import generate_fully

from offload.placement import Placement, device_bytes
from triforce_core import Engine
from triforce_core.model.tokenizer import load_tokenizer

RATIO = 100
# Without drafts a token is a pass, and all passes take the same time.
PLAIN_TOKENS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=6000, help="prompt length")
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--budget", type=int, default=1024, help="of the retrieval cache")
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the dense KV that the device has room for"
    )
    parser.add_argument("--result", default="bench_kv_planes")
    args = parser.parse_args()
    bench = PlanesBench(args)
    step_seconds, pass_bytes = bench.calibrate()
    bandwidth = pass_bytes / (RATIO * step_seconds)
    record: dict[str, Any] = {
        **workload(args, "bfloat16"),
        "new_tokens": args.new_tokens,
        "share": args.share,
        "device_memory_bytes": bench.device_bytes,
        "retrieval_step_seconds": step_seconds,
        "dense_bytes_per_pass": pass_bytes,
        "link_bytes_per_second": bandwidth,
        "methods": {},
    }
    path = None
    for name, new_tokens, options in (
        ("triforce, planes", args.new_tokens, {"kv": "planes"}),
        ("triforce, dense", args.new_tokens, {"kv": "dense"}),
        ("autoregressive, dense", PLAIN_TOKENS, {"kv": "dense", "method": "autoregressive"}),
        ("autoregressive, planes", PLAIN_TOKENS, {"kv": "planes", "method": "autoregressive"}),
    ):
        row = bench.measure(bandwidth, new_tokens, **options)
        record["methods"][name] = row
        path = write_result(args.result, record)
        print(f"{name}: {row['seconds_per_token']:.3f} s/token", flush=True)
    own = record["methods"]["triforce, planes"]["seconds_per_token"]
    record["ratios"] = {
        f"times {name}": row["seconds_per_token"] / own
        for name, row in record["methods"].items()
        if name != "triforce, planes"
    }
    path = write_result(args.result, record)
    show(record)
    print(f"written to {os.path.relpath(path)}")


class PlanesBench:
    """The prompts, and engines of one size of memory."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._tokenizer = load_tokenizer(model_file())
        self._prompts = stretches(self._tokenizer, args.prompts, args.tokens)
        self._budget = args.budget
        self._context = args.tokens + args.new_tokens
        with self._engine(None, method="triforce", kv="dense") as engine:
            demand = engine.runtime.demand
        dense = Placement((), True, int(demand.kv_blocks * args.share), 0, 3, 2)
        self.device_bytes = device_bytes(demand, dense)
        with self._engine(None, method="triforce", kv="planes") as engine:
            demand = engine.runtime.demand
        planes = replace(dense, resident_kv_blocks=0)
        spare = (self.device_bytes - device_bytes(demand, planes)) // demand.kv.block_bytes
        planes = replace(planes, resident_kv_blocks=min(spare, demand.kv_blocks))
        self._placements = {"dense": dense, "planes": planes}

    def calibrate(self) -> tuple[float, float]:
        """Seconds of a step of the retrieval model over one token, and bytes of a dense pass."""
        options = {"draft": "none", "draft_tokens": 24, "placement": self._placements["dense"]}
        with self._engine(None, kv="dense", method="triforce", **options) as engine:
            return step_and_pass(engine, self._prompts[0], 40)

    def measure(self, bandwidth: float, new_tokens: int, **options: Any) -> dict[str, Any]:
        options = {"method": "triforce", "placement": self._placements[options["kv"]], **options}
        runs = []
        with self._engine(bandwidth, **options) as engine:
            for seed, prompt in enumerate(self._prompts):
                stats = generate_fully(engine, prompt, new_tokens, seed)
                runs.append(
                    {
                        "seconds_per_token": stats["seconds_per_token"],
                        "tokens_per_pass": stats["tokens_per_pass"],
                        "passes": stats["passes"],
                        "seconds": stats["seconds"],
                        "bytes_per_pass": stats["link"]["floor_seconds_per_pass"] * bandwidth,
                        "acceptance": stats["acceptance"]["target"],
                    }
                )
        return {
            "seconds_per_token": statistics.median(run["seconds_per_token"] for run in runs),
            "seconds_per_token_of_all": sum(run["seconds"]["decode"] for run in runs)
            / (len(runs) * (new_tokens - 1)),
            "tokens_per_pass": statistics.median(run["tokens_per_pass"] for run in runs),
            "bytes_per_pass": statistics.median(run["bytes_per_pass"] for run in runs),
            "bits_per_number": stats["bits_per_number"]["kv"],
            "placement": stats["placement"],
            "levels": stats["levels"],
            "runs": runs,
        }

    def _engine(self, bandwidth: float | None, **options: Any) -> Engine:
        if options["method"] == "triforce":
            options["budget"] = self._budget
        return Engine.from_pretrained(
            model_file(),
            device="cpu",
            dtype="bfloat16",
            weights="dense",
            link_bandwidth=bandwidth,
            max_context=self._context,
            tokenizer=self._tokenizer,
            **options,
        )


def show(record: dict[str, Any]) -> None:
    columns = ("s/token", "tokens/pass", "MB/pass", "blocks on the device", "levels")
    table = Table(f"EMULATED link, {RATIO}:1", *columns)
    for name, row in record["methods"].items():
        placement = row["placement"]
        table.add_row(
            name,
            f"{row['seconds_per_token']:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['bytes_per_pass'] / 1e6:.1f}",
            f"{placement['resident_kv_blocks']} of {placement['kv_blocks']}",
            " > ".join(row["levels"]),
        )
    Console().print(table)
    for name, ratio in record["ratios"].items():
        print(f"{ratio:.2f} {name}")


if __name__ == "__main__":
    main()
