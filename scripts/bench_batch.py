"""Tokens per second of several texts at once, weights streamed over an EMULATED link.

SmolLM2-135M in float32, every layer streamed, at a link by which a pass that computes nothing
takes a second. Eight parts of the manual go on, each alone and then all in one pass each time,
greedily, so that the texts can be compared; plainly and with n-gram drafts. Prompts are read before
the clock starts; it stops when the last text has ended.

    python scripts/bench_batch.py [--tokens 512] [--new-tokens 64] [--sequences 8]

Prints a table and writes benchmarks/results/bench_batch.json.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

from material import model_file, stretches
from results import write_result
from rich.console import Console
from rich.table import Table

from offload.placement import Placement
from triforce_core import Completion, Engine, SamplingParams
from triforce_core.model.tokenizer import load_tokenizer

LINK_SECONDS = 1.0
# Of the 30 layers, in float32, all of which stream; KV stays on the device.
LAYER_BYTES = 424_742_400
STREAMED = Placement(tuple(range(30)), True, 10**6, 2, 0, 0)
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "n-gram drafts": {"method": "speculative", "draft": "ngram", "draft_tokens": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=8)
    args = parser.parse_args()
    tokenizer = load_tokenizer(model_file(), None)
    prompts = stretches(tokenizer, args.sequences, args.tokens)
    record: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct.Q4_1 as float32",
        "emulated": True,
        "prompt_tokens": args.tokens,
        "new_tokens": args.new_tokens,
        "sequences": args.sequences,
        "link_seconds_per_pass": LINK_SECONDS,
        "rows": {},
    }
    for name, method in METHODS.items():
        texts = {}
        for how, sequences in (("together", args.sequences), ("alone", 1)):
            options = {
                **{"device": "cpu", "dtype": "float32", "weights": "dense"},
                **{"max_context": args.tokens + args.new_tokens, "sequences": sequences},
                **{"placement": STREAMED, "link_bandwidth": LAYER_BYTES / LINK_SECONDS},
                **method,
            }
            with Engine.from_pretrained(model_file(), tokenizer=tokenizer, **options) as engine:
                row, texts[how] = timed(engine, prompts, args.new_tokens)
            record["rows"][f"{name}, {how}"] = row
            print(f"{name}, {how}: {row['tokens_per_second']:.2f} tokens/s", flush=True)
            write_result("bench_batch", record)
        together, alone = (record["rows"][f"{name}, {how}"] for how in texts)
        together["times_alone"] = together["tokens_per_second"] / alone["tokens_per_second"]
        together["same_texts"] = sum(a == b for a, b in zip(*texts.values(), strict=True))
    path = write_result("bench_batch", record)
    show(record)
    print(f"written to {os.path.relpath(path)}")


def timed(
    engine: Engine, prompts: list[list[int]], new_tokens: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures of all texts, as many at once as the engine takes, and the texts."""
    params = SamplingParams(new_tokens, temperature=0)
    results: dict[int, Completion] = {}
    seconds, passes = 0.0, 0
    link, runtime = engine.runtime.link, engine.runtime
    # Nothing is timed that is done for the first time.
    engine.generate_all([prompt[:16] for prompt in prompts], SamplingParams(4, temperature=0))
    engine.forget()
    waiting = list(enumerate(prompts))
    carried = untimed = 0
    while waiting:
        members = []
        while waiting and engine.has_room:
            index, prompt = waiting.pop(0)
            receive = partial(results.__setitem__, index)
            members.append(engine.add_request(prompt, params, receive))
        # Reads the prompts, and runs a first pass.
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
        "device_peak_bytes": runtime.memory.peak_bytes,
    }
    return row, tokens


def show(record: dict[str, Any]) -> None:
    table = Table(title=f"{record['sequences']} texts, EMULATED link")
    for column in ("", "tokens/s", "s/pass", "tokens/pass", "device MB", "times alone"):
        table.add_column(column)
    for name, row in record["rows"].items():
        table.add_row(
            name,
            f"{row['tokens_per_second']:.2f}",
            f"{row['seconds_per_pass']:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['device_peak_bytes'] / 1e6:.0f}",
            f"{row['times_alone']:.1f}" if "times_alone" in row else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
