"""Texts by every way of drafting against those of plain decoding, token by token.

Prompts are parts of the Python manual. Each is continued plainly, at temperature 0 and from a seed
whose draws are coupled, and then by some of the ways of drafting, in turn: chains, trees, the
retrieval level, with weights and KV that stream, and eight texts at once.

    python scripts/checks same_bits --model-in bfloat16
    python scripts/checks same_bits --model-in stored
    python scripts/checks same_bits --device cuda:0 --prompts 10 --result NAME
    TRIFORCE_KERNELS=reference python scripts/checks same_bits --prompts 20 --result NAME

The last one shows what the compiled kernels are for: without them, texts may differ. Writes
benchmarks/results/same_bits_bfloat16.json or same_bits_stored.json. Exits with 1 if rows have the
same bits and a text differs. Takes an hour for 100 prompts on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.material import manual, model_file
from frame import Benchmark, Figures, Option
from triforce_core import Engine, SamplingParams
from triforce_core.cli.verify.texts import PLAIN, SETTINGS, WAYS, first_difference
from triforce_offload.plan.placement import Placement

MODELS = {"bfloat16": {"dtype": "bfloat16"}, "stored": {"weights": "stored"}}
AT_ONCE = 8
# SmolLM2's layers, all of which stream, as all blocks of KV do.
STREAMED = Placement(tuple(range(30)), True, 0, 2, 3, 2)
LONGEST_PROMPT = 360


def ways() -> dict[str, dict[str, Any]]:
    chains = WAYS["n-grams, chains"]
    return {
        **WAYS,
        "streamed": {**chains, "placement": STREAMED, "block_tokens": 64},
        "eight at once": {**chains, "sequences": AT_ONCE},
    }


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    model = Path(args.model) if args.model else model_file()
    options = {"device": args.device, "threads": args.threads, "accept": "coupled"}
    # On a GPU rows have the same bits only if they are asked to.
    options |= {} if args.device == "cpu" else {"same_bits": "on"}
    options |= MODELS[args.model_in] | {"max_context": LONGEST_PROMPT + args.tokens}
    with Engine.from_pretrained(model, **options, **PLAIN) as engine:
        prompts = prompts_of(engine, args.prompts)
        holds = engine.generate(prompts[0], SamplingParams(1)).stats["same_bits"]
        about = {"model": model.name, "model_in": args.model_in, "device": args.device}
        yield about | {"same_bits": holds}
        every = range(len(prompts))
        plain = {name: texts(engine, prompts, every, name, args.tokens) for name in SETTINGS}
    for index, (way, more) in enumerate(ways().items()):
        some = every if args.all else every[index :: len(ways())]
        with Engine.from_pretrained(model, **options, **more) as engine:
            for name in SETTINGS:
                found = texts(engine, prompts, some, name, args.tokens)
                at = [
                    first_difference(plain[name][i], text)
                    for i, text in zip(some, found, strict=True)
                ]
                yield row(way, name, at, holds=holds)


def row(way: str, setting: str, at: Sequence[int | None], *, holds: bool) -> Figures:
    different = [place for place in at if place is not None]
    figures: Figures = {"texts": len(at), "different": len(different)}
    if different:
        figures["first_at"] = different
    part: Figures = {"ways": {f"{way}, {setting}": figures}}
    if holds and different:
        part["wrong"] = [f"{way}, {setting}: {len(different)} of {len(at)} texts differ"]
    return part


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    """Parts of the manual, of 60 to LONGEST_PROMPT tokens."""
    ids = engine.token_ids(manual(count * 1200))
    prompts, first = [], 0
    for index in range(count):
        length = 60 + index * 37 % (LONGEST_PROMPT - 60)
        prompts.append(ids[first : first + length])
        first = (first + length) % (len(ids) - LONGEST_PROMPT)
    return prompts


def texts(
    engine: Engine, prompts: Sequence[list[int]], some: Sequence[int], setting: str, tokens: int
) -> list[list[int]]:
    """The texts after some of the prompts, whose seeds are their indices."""
    params = [SamplingParams(tokens, seed=index, **SETTINGS[setting]) for index in some]
    return [
        list(done.token_ids)
        for done in engine.generate_all([prompts[index] for index in some], params)
    ]


main = Benchmark(
    __doc__,
    lambda args: f"same_bits_{args.model_in}",
    measure,
    (
        Option("--model", "", "a GGUF file or a directory; by default SmolLM2-135M"),
        Option("--device", "cpu", "cpu or a GPU, such as cuda:0"),
        Option("--model-in", "bfloat16", "how weights are kept", choices=tuple(MODELS)),
        Option("--prompts", 100, "number of prompts"),
        Option("--tokens", 256, "new tokens of each text"),
        Option("--threads", 1, "threads that compute"),
        Option("--all", False, "every prompt by every way, not each by one of them in turn"),
    ),
)
