"""How close a pass comes to the link, SmolLM2-135M after 6,000 tokens, over an EMULATED link.

1. The link dominates: seconds per pass of one token against the link's floor, with KV, weights or
   both streamed.
2. Compute dominates: seconds per pass of 65 tokens over a fast link against the same pass with
   everything resident, in turns in the same run. An emulated link copies with a thread of the CPU,
   so compute gets one core less than there are, in both; the memory they share remains.
3. Drafts: the share of each verify pass in which the link carries bytes, and how full the slots
   are when the pass begins.
4. Both kinds of passes, and what the planner predicts for them after a probe of two seconds.
5. Device memory for streaming, here and for the shape of Llama-2-7B with 131,072 tokens.

    python scripts/bench conveyor [--tokens 6000] [--repeats 5]

Writes benchmarks/results/bench_conveyor.json; with --plot, docs/trace.png too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from bench import workloads
from bench.material import model_file
from bench.placements import KV_STREAMED, RESIDENT, STREAMED
from bench.plot_trace import Event, draw, read_trace
from bench.predicted import Predicted, compare
from bench.workloads import MODEL, SAMPLING, greedy, stretches
from frame import ROOT, Benchmark, Figures, Option, timed
from triforce_core import Engine, SamplingParams
from triforce_core.decoding.decoder import PassInput
from triforce_core.decoding.distributions import distributions
from triforce_core.model.known.shapes import read_shape
from triforce_core.plan.machine import Device
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import MethodSettings
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import place

SLOW, FAST, DRAFTING = 0.5e9, 20e9, 100e6
VERIFIED = 65
PLOT = ROOT / "docs" / "trace.png"


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {"model": f"{MODEL} float32", "link": "emulated", "prompt_tokens": args.tokens}
    (prompt,) = stretches(1, args.tokens)
    predicted = Predicted.now(str(model_file()))
    for name, placement in STREAMED.items():
        row = link_dominates(prompt, placement, args.repeats, predicted)
        yield {"link_dominates": {name: row}}
    with one_thread_less():
        # Measure the rates again with the remaining threads.
        predicted = Predicted.now(str(model_file()))
        for name, placement in STREAMED.items():
            row = compute_dominates(prompt, placement, args.repeats, predicted)
            yield {"compute_dominates": {name: row}}
    yield {"drafts": drafts(prompt, args.new_tokens, PLOT if args.plot else None)}
    yield {"streaming_memory": streaming_memory(args.tokens)}


def link_dominates(
    prompt: list[int], placement: Placement, repeats: int, predicted: Predicted
) -> Figures:
    """Time repeated passes of one token. Return the median of their seconds, and their floor."""
    with ExitStack() as stack:
        passes = TimedPasses(prompt, placement, SLOW, repeats, stack)
        seconds, floor = passes.run(1, repeats)
        expected = predicted.a_pass(passes.engine, SLOW, len(prompt), 1)
    median = statistics.median(seconds)
    return {
        "bandwidth_gb_per_s": SLOW / 1e9,
        "seconds_per_pass": median,
        "floor_seconds_per_pass": floor,
        "ratio_to_floor": median / floor,
        "prediction": compare(expected, median),
        "seconds": seconds,
    }


def compute_dominates(
    prompt: list[int], placement: Placement, repeats: int, predicted: Predicted
) -> Figures:
    """Time passes of many tokens, streamed and resident in turns."""
    with ExitStack() as stack:
        streamed = TimedPasses(prompt, placement, FAST, repeats, stack)
        resident = TimedPasses(prompt, RESIDENT, None, repeats, stack)
        pairs = []
        for _ in range(repeats):
            (plain,), _ = resident.run(VERIFIED, 1)
            (over,), floor = streamed.run(VERIFIED, 1)
            pairs.append((over, plain))
        expected = predicted.a_pass(streamed.engine, FAST, len(prompt), VERIFIED)
    seconds = statistics.median(over for over, _ in pairs)
    return {
        "verified_tokens": VERIFIED,
        "threads": torch.get_num_threads(),
        "bandwidth_gb_per_s": FAST / 1e9,
        "seconds_per_pass": seconds,
        "resident_seconds_per_pass": statistics.median(plain for _, plain in pairs),
        "ratio_to_resident": statistics.median(over / plain for over, plain in pairs),
        "prediction": compare(expected, seconds),
        "copy_seconds": copy_seconds(int(floor * FAST)),
    }


class TimedPasses:
    """Passes over one prompt's KV, each timed from the end of the previous one to its own end."""

    def __init__(
        self,
        prompt: list[int],
        placement: Placement,
        bandwidth: float | None,
        repeats: int,
        stack: ExitStack,
    ) -> None:
        self.engine: Engine = stack.enter_context(
            workloads.engine(
                len(prompt) + 4 * repeats + 100,
                method="speculative",
                draft="none",
                draft_tokens=VERIFIED - 1,
                link_bandwidth=bandwidth,
                placement=placement,
            )
        )
        self._context = self.engine.new_context()
        stack.callback(self._context.close)
        stack.enter_context(torch.inference_mode())
        self._sequence = self._context.sequence
        self._passes = self._context.models.runtime.passes
        self._link = self.engine.link
        self._context.prefill(prompt, 100, lambda _: None)
        self._link.synchronize()
        self._tokens = torch.tensor(prompt[:VERIFIED])
        self.run(1, 1)

    def run(self, tokens: int, passes: int) -> tuple[list[float], float]:
        """Run passes that keep one token each. Return their seconds and the link's floor."""
        # Copies that ran ahead since the last call do not belong to these passes.
        self._pass(tokens)
        before = self._sequence.counters
        seconds = [timed(lambda: self._pass(tokens)) for _ in range(passes)]
        moved = (self._sequence.counters - before).bytes_to_device / passes
        return seconds, moved / self._link.bandwidth if self._link.bandwidth else 0.0

    def _pass(self, tokens: int) -> None:
        distributions(self._context.run(PassInput(self._tokens[:tokens])), greedy(1))
        self._context.keep([0])
        self._passes.begin([self._sequence])


@contextmanager
def one_thread_less() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def copy_seconds(size: int) -> float:
    """Return the seconds that one thread takes to copy `size` bytes while nothing computes."""
    source, target = (torch.zeros(size, dtype=torch.uint8).numpy() for _ in range(2))
    target[:] = source
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began


def drafts(prompt: list[int], new_tokens: int, plot: Path | None) -> Figures:
    """Measure the verify passes of triforce by their trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with workloads.engine(
            len(prompt) + new_tokens,
            method="triforce",
            draft="none",
            budget=1024,
            draft_tokens=24,
            link_bandwidth=DRAFTING,
            placement=KV_STREAMED,
            trace=file,
        ) as engine:
            params = SamplingParams(new_tokens, **SAMPLING, seed=0)
            stats = engine.generate(prompt, params).stats
            slots = KV_STREAMED.kv_slots * engine.memory_plan.requirements.kv.block_bytes
            tracks = read_trace(file)
        verifies = [e for e in tracks["host"] if e.name == "verify"]
        if plot:
            begin = verifies[-2].began - 2.5 if len(verifies) > 1 else 0.0
            draw(file, plot, max(0.0, begin), verifies[-1].ended)
    copies = [e for e in tracks["copy in"] if e.name == "kv"]
    return {
        "link_bytes_per_second": DRAFTING,
        "passes": stats["passes"],
        "tokens_per_pass": stats["tokens_per_pass"],
        "link_busy_share_of_verifying": busy_share(copies, verifies),
        "prefetched_share_of_slots": prefetched_share(copies, verifies, slots),
    }


def busy_share(copies: list[Event], verifies: list[Event]) -> float:
    """Return the median over passes of the share of verify time in which the link carries bytes."""
    shares = []
    for verify in verifies:
        busy = sum(
            max(0.0, min(copy.ended, verify.ended) - max(copy.began, verify.began))
            for copy in copies
        )
        shares.append(busy / verify.seconds)
    return statistics.median(shares)


def prefetched_share(copies: list[Event], verifies: list[Event], slot_bytes: int) -> float:
    """Return the median share of the slots that was full when a verify pass began.

    The first pass is left out.
    """
    shares = []
    for before, verify in pairwise(verifies):
        early = [c for c in copies if before.ended <= c.began and c.ended <= verify.began]
        shares.append(sum(copy.args["bytes"] for copy in early) / slot_bytes)
    return statistics.median(shares)


def streaming_memory(tokens: int) -> Figures:
    """Return the slots on the device that `place` plans, for two shapes."""
    figures = {}
    for shape, context, dtype, limit, block_bytes in (
        ("smollm2-135m", tokens + 128, torch.float32, 400 << 20, 8 << 20),
        ("llama2-7b", 131072, torch.float16, 24_000_000_000, 32 << 20),
    ):
        wanted = ModelSizes(
            read_shape(shape),
            dtype,
            context,
            MethodSettings(),
            device=Device(copy_bytes=block_bytes),
        )
        demand = wanted.requirements(0)
        placement = place(demand, limit).placement
        slots = (placement.kv_slots + placement.staging_slots) * demand.kv.block_bytes
        figures[shape] = {
            "context": context,
            "block_bytes": demand.kv.block_bytes,
            "streaming_bytes": slots,
            "share_of_one_layers_kv": slots / (demand.kv.token_bytes * context),
        }
    return figures


main = Benchmark(
    __doc__,
    "bench_conveyor",
    measure,
    (
        Option("--tokens", 6000, "tokens of the prompt"),
        Option("--repeats", 5, "passes of each kind"),
        Option("--new-tokens", 97, "tokens that are generated with drafts"),
        Option("--plot", False, "draw docs/trace.png"),
    ),
)
