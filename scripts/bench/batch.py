"""Tokens per second of several sequences at once, weights streamed over an EMULATED link.

SmolLM2-135M in float32 streams every layer over a link that takes a second for each pass. Eight
parts of the manual are continued, one after another and then all in each pass, without drafts and
with n-gram drafts. Decoding is greedy, so that the texts can be compared. Prompts are prefilled
before the clock starts; it stops when the last sequence has ended.

    python scripts/bench batch [--tokens 512] [--new-tokens 40] [--sequences 8]

Writes benchmarks/results/bench_batch.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial

from bench.placements import WEIGHTS_STREAMED
from bench.workloads import MODEL, engine, greedy, stretches
from frame import Benchmark, Figures, Option
from triforce_core import Completion, Engine

LINK_SECONDS = 1.0
# The bytes of the 30 layers in float32, all of which stream; KV stays on the device.
LAYER_BYTES = 424_742_400
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "n-gram drafts": {"method": "speculative", "draft": "ngram", "draft_tokens": 8},
}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {
        "model": f"{MODEL} float32",
        "emulated": True,
        "prompt_tokens": args.tokens,
        "new_tokens": args.new_tokens,
        "sequences": args.sequences,
        "link_seconds_per_pass": LINK_SECONDS,
    }
    prompts = stretches(args.sequences, args.tokens)
    for name, method in METHODS.items():
        rows, texts = {}, []
        for how, sequences in (("together", args.sequences), ("alone", 1)):
            with engine(
                args.tokens + args.new_tokens,
                dtype="float32",
                sequences=sequences,
                placement=WEIGHTS_STREAMED,
                link_bandwidth=LAYER_BYTES / LINK_SECONDS,
                **method,
            ) as model:
                rows[how], tokens = generated(model, prompts, args.new_tokens)
            texts.append(tokens)
            yield {"rows": {f"{name}, {how}": rows[how]}}
        times = rows["together"]["tokens_per_second"] / rows["alone"]["tokens_per_second"]
        same = sum(a == b for a, b in zip(*texts, strict=True))
        yield {"rows": {f"{name}, together": {"times_alone": times, "same_texts": same}}}


def generated(
    engine: Engine, prompts: list[list[int]], new_tokens: int
) -> tuple[Figures, list[list[int]]]:
    """Generate all sequences, as many at once as the engine accepts.

    Return the figures and the tokens.
    """
    results: dict[int, Completion] = {}
    seconds, passes = 0.0, 0
    link = engine.link
    # Warm up, so that no first-time work is timed.
    engine.generate_all([prompt[:16] for prompt in prompts], greedy(4))
    engine.forget()
    waiting = list(enumerate(prompts))
    carried = untimed = 0
    while waiting:
        members = []
        while waiting and engine.has_room:
            index, prompt = waiting.pop(0)
            receive = partial(results.__setitem__, index)
            members.append(engine.add_request(prompt, greedy(new_tokens), receive))
        # Prefill the prompts and run a first pass.
        going = engine.step()
        untimed += sum(member.made for member in members if not member.ended)
        before, began = link.counters(), time.perf_counter()
        while going:
            going = engine.step()
            passes += 1
        seconds += time.perf_counter() - began
        carried += (link.counters() - before).bytes_to_device
    tokens = [results[index].token_ids for index in range(len(prompts))]
    made = sum(map(len, tokens)) - untimed
    row = {
        "tokens": made,
        "seconds": seconds,
        "passes": passes,
        "tokens_per_second": made / seconds,
        "tokens_per_pass": made / passes,
        "seconds_per_pass": seconds / passes,
        "link_bytes_per_pass": carried / passes,
        "device_peak_bytes": engine.memory.peak_bytes,
    }
    return row, tokens


main = Benchmark(
    __doc__,
    "bench_batch",
    measure,
    (
        Option("--tokens", 512, "tokens of each prompt"),
        Option("--new-tokens", 40, "tokens that are generated after it"),
        Option("--sequences", 8, "sequences at once"),
    ),
)
