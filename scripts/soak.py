"""Mixed requests to one engine for a long time: memory, threads and descriptors stay flat.

SmolLM2-135M with KV and weights streamed over an EMULATED link, in turns at random: prompts that go
on, turn back or are new, sampled and greedy, with penalties, stops and logprobs; interrupted ones;
contexts saved and loaded. One greedy request is asked at the beginning and at the end, and its
tokens must be the same.

    python scripts/soak.py [--minutes 60]

Prints a line a minute and writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from material import manual, model_file
from results import write_result

from triforce_core import Engine, SamplingParams

CONTEXT = 1200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=60)
    args = parser.parse_args()
    choose, process = random.Random(0), psutil.Process()
    made: Counter[str] = Counter()
    samples: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.from_pretrained(
            model_file(),
            device="cpu",
            device_memory="420MiB",
            link_bandwidth="8GB/s",
            weights="dense",
            max_context=CONTEXT,
            block_tokens=64,
        ) as engine,
    ):
        soak = Soak(engine, choose, Path(folder))
        asked = SamplingParams(24, temperature=0)
        fixed = soak.text[:300]
        first = engine.generate(fixed, asked, reuse=False).token_ids
        end, following = time.monotonic() + 60 * args.minutes, 0.0
        while time.monotonic() < end:
            made[soak.step()] += 1
            if time.monotonic() > following:
                following = time.monotonic() + min(60.0, 6 * args.minutes)
                gc.collect()
                sample = {
                    "seconds": round(time.monotonic() - (end - 60 * args.minutes)),
                    "resident_bytes": process.memory_info().rss,
                    "threads": threading.active_count(),
                    "descriptors": process.num_fds(),
                    "device_bytes": sum(engine.runtime.memory.by_purpose().values()),
                    "host_bytes": engine.runtime.host.nbytes,
                }
                samples.append(sample)
                print(sample, flush=True)
        last = engine.generate(fixed, asked, reuse=False).token_ids
        left = [entry.name for entry in Path(folder).iterdir()]
    half = samples[len(samples) // 2 :]
    hours = (half[-1]["seconds"] - half[0]["seconds"]) / 3600
    grown = half[-1]["resident_bytes"] - half[0]["resident_bytes"]
    figures = {
        "model": "SmolLM2-135M-Instruct.Q4_1 as float32",
        "minutes": args.minutes,
        "requests": dict(made),
        "same_tokens": first == last,
        "resident_bytes_an_hour": grown / hours if hours else None,
        "median_resident_bytes": statistics.median(s["resident_bytes"] for s in half),
        "threads": sorted({s["threads"] for s in half}),
        "descriptors": sorted({s["descriptors"] for s in half}),
        "files_left": left,
        "samples": samples,
    }
    path = write_result("soak", figures)
    print(f"{sum(made.values())} requests, the same tokens at the end: {first == last}")
    print(f"written to {os.path.relpath(path)}")


class Soak:
    """One request after another."""

    def __init__(self, engine: Engine, choose: random.Random, folder: Path) -> None:
        self.text = engine.tokenizer.encode(manual(20 * CONTEXT))
        self._engine = engine
        self._choose = choose
        self._file = folder / "context"
        self._saved: list[int] | None = None

    def step(self) -> str:
        """Does something, and says what."""
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


if __name__ == "__main__":
    main()
