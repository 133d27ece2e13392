"""Generation over an EMULATED link whose speed is set by the retrieval level's own speed.

A pass over the link takes RATIO times as long as a step of the retrieval level over one token, like
2.5 s and 25 ms on an RTX 4090, so the figures apply to a machine with such a slow link.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench import workloads
from bench.workloads import MODEL, SAMPLING, generate_fully
from frame import Figures
from triforce_core import Engine, SamplingParams

RATIO = 100


def workload(args: argparse.Namespace, dtype: str) -> Figures:
    """Return the entries of a record that describe the prompts and the sampling."""
    return {
        "model": f"{MODEL} {dtype}",
        "link": "emulated",
        "prompt_tokens": args.tokens,
        "prompts": args.prompts,
        **SAMPLING,
        "budget": args.budget,
    }


@dataclass(frozen=True)
class PacedBench:
    """Engines in bfloat16 over links of different speeds, and the prompts for all of them.

    prompts: token ids, all of the same length
    budget: the tokens in the retrieval cache
    new_tokens: the most that any engine generates, so that all contexts have the same size
    """

    prompts: Sequence[list[int]]
    new_tokens: int
    budget: int
    options: dict[str, Any] = field(default_factory=lambda: {"dtype": "bfloat16"})

    def engine(self, bandwidth: float | None, **options: Any) -> Engine:
        if options.setdefault("method", "triforce") == "triforce":
            options["budget"] = self.budget
        context = len(self.prompts[0]) + self.new_tokens
        return workloads.engine(context, link_bandwidth=bandwidth, **self.options | options)

    def calibrate(self, new_tokens: int = 40, **options: Any) -> tuple[float, float]:
        """Return the seconds of a retrieval step over one token, and the bytes of a pass.

        options: further options of an engine whose retrieval level drafts alone
        """
        options = {"draft": "none", "draft_tokens": 24} | options
        with self.engine(None, **options) as engine:
            params = SamplingParams(min(new_tokens, self.new_tokens), **SAMPLING, seed=0)
            # Warm up.
            engine.generate(self.prompts[0], params, reuse=False)
            with stopwatch(engine) as watch:
                stats = engine.generate(self.prompts[0], params, reuse=False).stats
        link = stats["link"]
        moved = link["floor_seconds_per_pass"] * link["bandwidth_gb_per_s"] * 1e9
        # With no drafter, every forward over one token is a step of the retrieval level.
        return statistics.median(watch.single_token_seconds), moved

    def measure(self, bandwidth: float, new_tokens: int, **options: Any) -> Figures:
        """Return the medians over the prompts, and each run."""
        runs = []
        with self.engine(bandwidth, **options) as engine:
            for seed, prompt in enumerate(self.prompts):
                stats = generate_fully(engine, prompt, new_tokens, seed)
                shown = ("seconds_per_token", "tokens_per_pass", "passes", "seconds")
                runs.append(
                    {
                        **{name: stats[name] for name in shown},
                        "bytes_per_pass": stats["link"]["floor_seconds_per_pass"] * bandwidth,
                        "acceptance": stats["acceptance"]["target"],
                        "draft_tokens": stats["draft_tokens"],
                    }
                )
        tokens = len(runs) * (new_tokens - 1)
        return {
            "seconds_per_token": statistics.median(run["seconds_per_token"] for run in runs),
            "seconds_per_token_of_all": sum(run["seconds"]["decode"] for run in runs) / tokens,
            "tokens_per_pass": statistics.median(run["tokens_per_pass"] for run in runs),
            "bytes_per_pass": statistics.median(run["bytes_per_pass"] for run in runs),
            "bits_per_number": stats["bits_per_number"]["kv"],
            "placement": stats["placement"],
            "levels": stats["levels"],
            "runs": runs,
        }


def ratios_to(own: str, methods: dict[str, Figures]) -> dict[str, float]:
    """Return the time per token of each other method, as a multiple of that of `own`."""
    seconds = methods[own]["seconds_per_token"]
    return {
        f"times {name}": row["seconds_per_token"] / seconds
        for name, row in methods.items()
        if name != own
    }


class Stopwatch:
    """The seconds inside model forwards and waits for the link, from the first forward after
    prefill.

    It also times each forward over one token, including its head.
    """

    def __init__(self) -> None:
        self.decode_seconds = 0.0
        self.single_token_seconds: list[float] = []
        self._inside = self._decoding = self._single = False

    def timed(self, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._count(function.__name__, args, kwargs, time.perf_counter() - began)
                self._inside = False

        return timed

    def _count(self, name: str, args: tuple, kwargs: dict, seconds: float) -> None:
        if name == "forward":
            self._decoding = not kwargs.get("chunk")
            self._single = self._decoding and args[0].rows == 1
            if self._single:
                self.single_token_seconds.append(0.0)
        if self._decoding:
            self.decode_seconds += seconds
        if self._single and name in ("forward", "logits"):
            self.single_token_seconds[-1] += seconds


@contextmanager
def stopwatch(engine: Engine) -> Iterator[Stopwatch]:
    """Time one request of an engine from outside."""
    watch = Stopwatch()
    model, link = engine.model, engine.link
    wrapped = [(model, "forward"), (model, "logits"), (link, "wait"), (link, "wait_on_host")]
    for owner, name in wrapped:
        setattr(owner, name, watch.timed(getattr(owner, name)))
    try:
        yield watch
    finally:
        for owner, name in wrapped:
            delattr(owner, name)
