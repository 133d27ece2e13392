"""K4: send mixed requests to one engine for a long time; memory, threads and descriptors stay flat.

SmolLM2-135M streams KV and weights over an EMULATED link. Requests of random kinds alternate:
prompts that continue the context, share a prefix with it or are new; sampled and greedy ones, with
penalties, stops and logprobs; interrupted requests; contexts saved and loaded. One greedy request
is made at the beginning and at the end, and its tokens must be the same.

    python scripts/checks soak [--minutes 60]

Prints a line each minute and writes benchmarks/results/soak.json. Exits with 1 if the tokens
differ.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench import workloads
from bench.material import manual
from bench.workloads import MODEL, greedy
from frame import Benchmark, Figures, Option
from triforce_core import Engine, SamplingParams

CONTEXT = 1200


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {"model": f"{MODEL} float32", "minutes": args.minutes}
    made: Counter[str] = Counter()
    samples: list[Figures] = []
    seconds, following = 60 * args.minutes, 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        workloads.engine(
            CONTEXT,
            device_memory="420MiB",
            link_bandwidth="8GB/s",
            weights="dense",
            block_tokens=64,
        ) as engine,
    ):
        soak = Soak(engine, random.Random(0), Path(folder))
        fixed = soak.text[:300]
        first = engine.generate(fixed, greedy(24), reuse=False).token_ids
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds:
            if elapsed >= following:
                following = elapsed + min(60.0, seconds / 10)
                samples.append(sample(engine, elapsed))
                yield {"samples": samples[-1:]}
            made[soak.step()] += 1
        last = engine.generate(fixed, greedy(24), reuse=False).token_ids
        left = [entry.name for entry in Path(folder).iterdir()]
    half = samples[len(samples) // 2 :]
    hours = (half[-1]["seconds"] - half[0]["seconds"]) / 3600
    grown = half[-1]["resident_bytes"] - half[0]["resident_bytes"]
    yield {
        "requests": dict(made),
        "same_tokens": first == last,
        "resident_bytes_an_hour": grown / hours if hours else None,
        "median_resident_bytes": statistics.median(s["resident_bytes"] for s in half),
        "threads": sorted({s["threads"] for s in half}),
        "descriptors": sorted({s["descriptors"] for s in half}),
        "files_left": left,
    }


def sample(engine: Engine, elapsed: float) -> Figures:
    """Return the memory, threads and descriptors that this process uses now."""
    gc.collect()
    process = psutil.Process()
    found = {
        "seconds": round(elapsed),
        "resident_bytes": process.memory_info().rss,
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "device_bytes": sum(engine.memory.by_purpose().values()),
        "host_bytes": engine.runtime.host.nbytes,
    }
    print(found, file=sys.stderr, flush=True)
    return found


class Soak:
    """A source of random requests to one engine."""

    def __init__(self, engine: Engine, choose: random.Random, folder: Path) -> None:
        self.text = engine.tokenizer.encode(manual(20 * CONTEXT))
        self._engine = engine
        self._choose = choose
        self._file = folder / "context"
        self._saved: list[int] | None = None

    def step(self) -> str:
        """Make a request of a random kind. Return the kind."""
        choose = self._choose
        what = choose.choices(
            ("new", "goes on", "turns back", "interrupted", "saved", "loaded"), (3, 5, 2, 3, 1, 1)
        )[0]
        known = self._engine.context_tokens
        if what == "saved" and known:
            self._engine.save_context(self._file)
            self._saved = known
            return what
        if what == "loaded" and self._saved:
            self._engine.load_context(self._file)
            assert self._engine.context_tokens == self._saved
            return what
        start = choose.randrange(len(self.text) - CONTEXT)
        prompt = self.text[start : start + choose.randint(5, 400)]
        if what == "goes on" and 0 < len(known) < CONTEXT - 500:
            prompt = known + prompt
        elif what == "turns back" and len(known) > 20:
            prompt = known[: choose.randrange(10, len(known))][: CONTEXT - 500] + prompt[:50]
        params = SamplingParams(
            choose.randint(1, 60),
            temperature=choose.choice((0, 0.6, 1.0)),
            min_p=choose.choice((0.0, 0.05)),
            repeat_penalty=choose.choice((1.0, 1.1)),
            stop=choose.choice(((), ("\n\n",))),
            logprobs=choose.choice((None, 2)),
        )
        stream = self._engine.stream(prompt, params)
        for count, _ in enumerate(stream.pieces()):
            if what == "interrupted" and count == 2:
                stream.interrupt()
        return what


main = Benchmark(
    __doc__, "soak", measure, (Option("--minutes", 60.0, "how long requests are made"),)
)
