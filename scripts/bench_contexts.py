"""What a saved context spares: reading 6,000 tokens, against loading them from a file.

SmolLM2-135M in float32, everything on the device. A text is read and saved; another engine loads it
and goes on. Its greedy tokens must be those of the engine that read the text.

    python scripts/bench_contexts.py [--tokens 6000] [--repeats 3]

Prints figures and writes benchmarks/results/bench_contexts.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from material import manual, model_file
from results import write_result

from triforce_core import Engine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    params = SamplingParams(16, temperature=0)
    options = {"device": "cpu", "max_context": args.tokens + 64, "method": "autoregressive"}
    seconds: dict[str, list[float]] = {"prefill": [], "save": [], "load": [], "next_turn": []}

    def timed(name: str, run: Callable[[], object]) -> None:
        began = time.perf_counter()
        run()
        seconds[name].append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "context.safetensors"
        with Engine.from_pretrained(model_file(), **options) as engine:
            tokenizer = engine.tokenizer
            prompt = tokenizer.encode(manual(5 * args.tokens))[: args.tokens]
            following = [*prompt, *tokenizer.encode(" In short:")]
            for _ in range(args.repeats):
                stats = engine.generate(prompt, SamplingParams(1), reuse=False).stats
                seconds["prefill"].append(stats["seconds"]["prefill"])
            timed("save", lambda: engine.save_context(path))
            expected = engine.generate(following, params)
        with Engine.from_pretrained(model_file(), tokenizer=tokenizer, **options) as engine:
            for _ in range(args.repeats):
                engine.forget()
                timed("load", lambda: engine.load_context(path))
                found = engine.generate(following, params)
                seconds["next_turn"].append(found.stats["seconds"]["prefill"])
        size = path.stat().st_size
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    figures = {
        "model": "SmolLM2-135M-Instruct.Q4_1 as float32",
        "prompt_tokens": args.tokens,
        "file_bytes": size,
        "same_tokens": found.token_ids == expected.token_ids,
        "reused_tokens": found.stats["reused_tokens"],
        "median_seconds": medians,
        "load_over_prefill": medians["load"] / medians["prefill"],
        "seconds": seconds,
    }
    for name, value in medians.items():
        print(f"{name}: {value:.3f} s")
    print(f"loading takes {figures['load_over_prefill']:.3f} of reading; {size / 1e6:.0f} MB")
    print(f"written to {os.path.relpath(write_result('bench_contexts', figures))}")


if __name__ == "__main__":
    main()
