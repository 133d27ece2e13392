"""How close a pass comes to the link, SmolLM2-135M after 6,000 tokens, over an EMULATED link.

1. The link dominates: seconds per pass of one token against the link's floor, with KV, weights or
   both streamed.
2. Compute dominates: seconds per pass of 65 tokens over a fast link against the same pass with
   everything resident, in turns in the same run. An emulated link copies with a thread of the CPU,
   so compute gets one core less than there are, in both; the memory they share remains.
3. Drafts: how much of each verifying pass the link carries bytes, and how much of what the slots
   hold had come before the pass began.
4. Both kinds of passes, and what the planner predicts of them after a probe of two seconds.
5. Device memory for streaming, here and at Llama-2-7B's shape with 131,072 tokens.

    python scripts/bench_conveyor.py [--tokens 6000] [--repeats 5]

Prints tables and writes benchmarks/results/bench_conveyor.json and docs/trace.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench_decode
import torch
from bench_decode import ALL
from material import model_file, stretches
from predicted import Predicted, compare
from results import write_result
from rich.console import Console
from rich.table import Table
from trace_file import Event, read_trace

from offload.placement import Placement, place
from triforce_core import Engine, SamplingParams
from triforce_core.decoding.context import Context
from triforce_core.decoding.laws import laws
from triforce_core.model.shapes import read_shape
from triforce_core.settings import MethodSettings
from triforce_core.sizing.demand import Wanted

RESIDENT = Placement((), True, ALL, 0, 0, 0)
STREAMED = {name: placement for name, (placement, _) in bench_decode.STREAMED.items()}
SLOW, FAST = 0.5e9, 20e9
VERIFIED = 65
PLOT = Path(__file__).parent.parent / "docs" / "trace.png"
PARAMS = SamplingParams(1, temperature=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=6000, help="prompt length")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=97, help="generated with drafts")
    args = parser.parse_args()
    bench = ConveyorBench(args.tokens, args.repeats)
    dominated = {name: bench.link_dominates(p) for name, p in STREAMED.items()}
    computed = bench.compute_dominates()
    drafts = bench.drafts(args.new_tokens)
    memory = streaming_memory(args.tokens)
    path = write_result(
        "bench_conveyor",
        {
            "model": "SmolLM2-135M-Instruct.Q4_1 as float32",
            "link": "emulated",
            "prompt_tokens": args.tokens,
            "link_dominates": dominated,
            "compute_dominates": computed,
            "drafts": drafts,
            "streaming_memory": memory,
        },
    )
    print_tables(dominated, computed, drafts, memory)
    print(f"written to {os.path.relpath(path)} and {os.path.relpath(PLOT)}")


class ConveyorBench:
    def __init__(self, tokens: int, repeats: int) -> None:
        self._tokens = tokens
        self._repeats = repeats
        self._prompt: list[int] = []
        self._tokenizer: Any = None

    def link_dominates(self, placement: Placement) -> dict[str, Any]:
        """A pass of one token, again and again: the medians of its seconds and of its floor."""
        predicted = Predicted.now(str(model_file()))
        with ExitStack() as stack:
            engine = self._engine(placement, SLOW, stack)
            passes = TimedPasses(engine, self._prompt, stack)
            seconds, floor = passes.run(1, self._repeats)
            expected = predicted.a_pass(engine, SLOW, self._tokens, 1)
        median = statistics.median(seconds)
        return {
            "bandwidth_gb_per_s": SLOW / 1e9,
            "seconds_per_pass": median,
            "floor_seconds_per_pass": floor,
            "ratio_to_floor": median / floor,
            "prediction": compare(expected, median),
            "seconds": seconds,
        }

    def compute_dominates(self) -> dict[str, Any]:
        """Passes of many tokens, streamed and resident in turns."""
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads - 1))
        try:
            return self._compute_dominates()
        finally:
            torch.set_num_threads(threads)

    def _compute_dominates(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        # The rates are measured with the threads that are left.
        predicted = Predicted.now(str(model_file()))
        for name, placement in STREAMED.items():
            with ExitStack() as stack:
                engine = self._engine(placement, FAST, stack)
                streamed = TimedPasses(engine, self._prompt, stack)
                resident = TimedPasses(self._engine(RESIDENT, None, stack), self._prompt, stack)
                pairs = []
                for _ in range(self._repeats):
                    (plain,), _ = resident.run(VERIFIED, 1)
                    (over,), floor = streamed.run(VERIFIED, 1)
                    pairs.append((over, plain))
                moved = floor * FAST
                expected = predicted.a_pass(engine, FAST, self._tokens, VERIFIED)
            figures[name] = {
                "verified_tokens": VERIFIED,
                "threads": torch.get_num_threads(),
                "bandwidth_gb_per_s": FAST / 1e9,
                "seconds_per_pass": statistics.median(over for over, _ in pairs),
                "resident_seconds_per_pass": statistics.median(plain for _, plain in pairs),
                "ratio_to_resident": statistics.median(over / plain for over, plain in pairs),
                "prediction": compare(expected, statistics.median(over for over, _ in pairs)),
                "copy_seconds": copy_seconds(int(moved)),
            }
        return figures

    def drafts(self, new_tokens: int) -> dict[str, Any]:
        """Verifying passes of the hierarchy, by their trace."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            file = Path(folder) / "trace.json"
            placement = STREAMED["KV streamed"]
            engine = self._engine(
                placement,
                100e6,
                stack,
                method="triforce",
                budget=1024,
                draft_tokens=24,
                trace=file,
                max_context=self._tokens + new_tokens,
            )
            params = SamplingParams(new_tokens, temperature=0.6, top_p=0.9, seed=0)
            stats = engine.generate(self._prompt, params).stats
            tracks = read_trace(file)
            slots = placement.kv_slots * engine.runtime.demand.kv.block_bytes
            verifies = [e for e in tracks["host"] if e.name == "verify"]
            last = verifies[-1].ended
            begin = verifies[-2].began - 2.5 if len(verifies) > 1 else 0.0
            subprocess.run(
                [
                    *(sys.executable, Path(__file__).with_name("plot_trace.py"), file, PLOT),
                    *("--begin", str(max(0.0, begin)), "--end", str(last)),
                ],
                check=True,
            )
        copies = [e for e in tracks["copy in"] if e.name == "kv"]
        return {
            "link_bytes_per_second": 100e6,
            "passes": stats["passes"],
            "tokens_per_pass": stats["tokens_per_pass"],
            "link_busy_share_of_verifying": busy_share(copies, verifies),
            "prefetched_share_of_slots": prefetched_share(copies, verifies, slots),
        }

    def _engine(
        self, placement: Placement, bandwidth: float | None, stack: ExitStack, **options: Any
    ) -> Engine:
        options = {
            "method": "speculative",
            "draft": "none",
            "draft_tokens": VERIFIED - 1,
            "max_context": self._tokens + 4 * self._repeats + 100,
            **options,
        }
        engine = stack.enter_context(
            Engine.from_pretrained(
                model_file(),
                device="cpu",
                link_bandwidth=bandwidth,
                placement=placement,
                tokenizer=self._tokenizer,
                **options,
            )
        )
        if not self._prompt:
            self._tokenizer = engine.tokenizer
            (self._prompt,) = stretches(engine.tokenizer, 1, self._tokens)
        return engine


class TimedPasses:
    """Passes over one prompt's KV, each timed from the end of the one before to its own end."""

    def __init__(self, engine: Engine, prompt: list[int], stack: ExitStack) -> None:
        context = Context(engine.models)
        stack.callback(context.close)
        stack.enter_context(torch.inference_mode())
        self._passes = context.passes
        self._link = engine.runtime.link
        context.read(prompt, 100, lambda _: None)
        self._link.synchronize()
        self._context = context
        self._tokens = torch.tensor(prompt[:VERIFIED])
        self.run(1, 1)

    def run(self, tokens: int, passes: int) -> tuple[list[float], float]:
        """Seconds of each pass, of which one token is kept, and the link's floor for one."""
        seconds = []
        # The copies that ran ahead since the last call are not of these passes.
        self._pass(tokens)
        before = self._passes.counters
        for _ in range(passes):
            began = time.perf_counter()
            self._pass(tokens)
            seconds.append(time.perf_counter() - began)
        moved = (self._passes.counters - before).bytes_to_device / passes
        return seconds, moved / self._link.bandwidth if self._link.bandwidth else 0.0

    def _pass(self, tokens: int) -> None:
        laws(self._context.verify(self._tokens[:tokens]), PARAMS)
        self._context.keep([0])
        self._passes.begin()


def copy_seconds(size: int) -> float:
    """What one thread takes to copy so many bytes, while nothing computes."""
    source, target = (torch.zeros(size, dtype=torch.uint8).numpy() for _ in range(2))
    target[:] = source
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began


def busy_share(copies: list[Event], verifies: list[Event]) -> float:
    """Median over passes of the share of verifying in which the link carries bytes."""
    shares = []
    for verify in verifies:
        busy = sum(
            max(0.0, min(copy.ended, verify.ended) - max(copy.began, verify.began))
            for copy in copies
        )
        shares.append(busy / verify.seconds)
    return statistics.median(shares)


def prefetched_share(copies: list[Event], verifies: list[Event], slot_bytes: int) -> float:
    """Median over passes, but the first, of the share of the slots that was full when verifying
    began.
    """
    shares = []
    for before, verify in pairwise(verifies):
        early = [c for c in copies if before.ended <= c.began and c.ended <= verify.began]
        shares.append(sum(copy.args["bytes"] for copy in early) / slot_bytes)
    return statistics.median(shares)


def streaming_memory(tokens: int) -> dict[str, Any]:
    """Slots on the device as `place` plans them, on 24 GB."""
    figures = {}
    for shape, context, dtype, limit, block_bytes in (
        ("smollm2-135m", tokens + 128, torch.float32, 400 << 20, 8 << 20),
        ("llama2-7b", 131072, torch.float16, 24_000_000_000, 32 << 20),
    ):
        wanted = Wanted(
            read_shape(shape), dtype, context, MethodSettings(), block_bytes=block_bytes
        )
        demand = wanted.demand(0)
        placement = place(demand, limit)
        slots = (placement.kv_slots + placement.staging_slots) * demand.kv.block_bytes
        figures[shape] = {
            "context": context,
            "block_bytes": demand.kv.block_bytes,
            "streaming_bytes": slots,
            "share_of_one_layers_kv": slots / (demand.kv.token_bytes * context),
        }
    return figures


def print_tables(
    dominated: dict[str, Any], computed: dict[str, Any], drafts: dict[str, Any], memory: Any
) -> None:
    console = Console()
    table = Table(
        "EMULATED link dominates", "floor s/pass", "s/pass", "ratio to floor", "predicted"
    )
    for name, row in dominated.items():
        table.add_row(
            name,
            f"{row['floor_seconds_per_pass']:.4f}",
            f"{row['seconds_per_pass']:.4f}",
            f"{row['ratio_to_floor']:.3f}",
            f"{row['prediction']['predicted']:.4f}, {row['prediction']['ratio']:.3f} of measured",
        )
    console.print(table)
    table = Table(
        "compute dominates", "resident s/pass", "s/pass", "ratio", "copying alone, s", "predicted"
    )
    for name, row in computed.items():
        table.add_row(
            name,
            f"{row['resident_seconds_per_pass']:.4f}",
            f"{row['seconds_per_pass']:.4f}",
            f"{row['ratio_to_resident']:.3f}",
            f"{row['copy_seconds']:.4f}",
            f"{row['prediction']['predicted']:.4f}, {row['prediction']['ratio']:.3f} of measured",
        )
    console.print(table)
    console.print(
        f"drafts: link busy {drafts['link_busy_share_of_verifying']:.1%} of verifying, "
        f"{drafts['prefetched_share_of_slots']:.0%} of the slots full when it begins"
    )
    for name, row in memory.items():
        console.print(
            f"{name}, {row['context']} tokens: {row['streaming_bytes'] / (1 << 20):.1f} MiB for "
            f"streaming, {row['share_of_one_layers_kv']:.3f} of one layer's KV"
        )


if __name__ == "__main__":
    main()
