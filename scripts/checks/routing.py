"""How a model's tokens choose experts, and what a pool of them on the device would have.

Runs a model with experts on a text and records what the routers choose: how many of a
token's experts the token before it chose, how many different experts several consecutive tokens
choose, and which share of a token's experts a pool has, by its size. A pool is filled with the
experts of the prompt's end, as in a run, and at most two experts a layer join it after each token.

    python scripts/checks routing --model MODEL [--prompt FILE] [--tokens 256] [--device cuda:0]

Writes a record only with --result. The planner's own numbers are those of others' models
(docs/planner.md).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path

import torch

from bench.material import manual
from frame import Benchmark, Figures, Option
from triforce_core import Engine, SamplingParams
from triforce_core.model import mlps
from triforce_core.model.config import ModelConfig
from triforce_offload.weights.experts import MOST_INSERTED, RecentExperts

# Consecutive tokens, as those of a draft are.
ROWS = (1, 2, 4, 8, 16)
# Shares of a layer's experts.
POOLS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
# The experts of each token, and those of a layer's tokens.
Chosen = list[int]
Trace = list[Chosen]


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    if not args.model:
        raise SystemExit("--model names a model with experts")
    text = Path(args.prompt).read_text("utf-8") if args.prompt else manual(8 * args.context)
    with Engine.from_pretrained(
        args.model, device=args.device, method="autoregressive", max_context=args.context
    ) as engine:
        config = engine.models.target.config
        layers = [spec.mlp for spec in config.layers if spec.mlp.active]
        if not layers:
            raise SystemExit(f"{args.model} has no experts")
        prompt = engine.token_ids(text)[: args.context - args.tokens]
        with recorded() as calls:
            engine.generate(prompt, SamplingParams(args.tokens, temperature=0))
    yield {
        "model": Path(args.model).name,
        "experts": layers[0].count,
        "chosen": layers[0].active,
        "prompt_tokens": len(prompt),
    }
    yield figures(config, *traces(calls, len(layers)))


@contextmanager
def recorded() -> Iterator[list[torch.Tensor]]:
    """Record what routers choose: the experts of the rows of each call, [rows, active]."""
    choose, calls = mlps.choose, []

    def recording(*inputs: object) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = choose(*inputs)
        calls.append(chosen.cpu())
        return chosen, weights

    mlps.choose = recording
    try:
        yield calls
    finally:
        mlps.choose = choose


def traces(calls: Sequence[torch.Tensor], layers: int) -> tuple[list[Trace], list[Trace]]:
    """Return the experts of a prompt's last rows and those of the decoded tokens, of each layer.
    Passes of plain decoding have one row; a prompt computes a layer's rows part by part.
    """
    passes = [call for call in calls if len(call) == 1]
    decoded = [list(map(_only, passes[layer::layers])) for layer in range(layers)]
    parts = [call for call in calls if len(call) > 1]
    each = len(parts) // layers
    return [parts[(layer + 1) * each - 1].tolist() for layer in range(layers)], decoded


def _only(call: torch.Tensor) -> Chosen:
    return call[0].tolist()


def figures(config: ModelConfig, prompts: list[Trace], decoded: list[Trace]) -> Figures:
    """Return means over layers and tokens."""
    mlp = next(spec.mlp for spec in config.layers if spec.mlp.active)
    again = [
        len(set(before) & set(token)) / len(token)
        for trace in decoded
        for before, token in pairwise(trace)
    ]
    return {
        "decoded_tokens": len(decoded[0]),
        "chosen_by_the_token_before": statistics.fmean(again),
        "of_chance": mlp.active / mlp.count,
        "distinct_experts": {
            str(rows): {"measured": distinct(decoded, rows), "of_chance": mlp.distinct(rows)}
            for rows in ROWS
            if rows <= len(decoded[0])
        },
        "pools": {
            str(max(1, round(share * mlp.count))): {
                "share_of_experts": share,
                "has": hits(prompts, decoded, mlp.count, max(1, round(share * mlp.count))),
            }
            for share in POOLS
        },
    }


def distinct(decoded: list[Trace], rows: int) -> float:
    """Return how many different experts `rows` consecutive tokens choose in a layer."""
    return statistics.fmean(
        len(set(chain.from_iterable(trace[first : first + rows])))
        for trace in decoded
        for first in range(0, len(trace) - rows + 1, rows)
    )


def hits(prompts: list[Trace], decoded: list[Trace], count: int, slots: int) -> float:
    """Return which share of tokens' experts pools have."""
    found = chosen = 0
    for prompt, trace in zip(prompts, decoded, strict=True):
        recent = RecentExperts(count, slots)
        for slot, expert in enumerate(recent.after_prefill(chain.from_iterable(prompt[::-1]))):
            recent.put(expert, slot)
        for token in trace:
            there, missing = recent.after_pass(token)
            found += there
            chosen += len(token)
            for expert in missing[:MOST_INSERTED]:
                if (slot := recent.make_room(token)) is not None:
                    recent.put(expert, slot)
    return found / chosen


main = Benchmark(
    __doc__,
    None,
    measure,
    (
        Option("--model", "", "a GGUF file or a directory of a model with experts"),
        Option("--prompt", "", "a text file; by default parts of the Python manual"),
        Option("--tokens", 256, "tokens that are generated"),
        Option("--context", 8192, "tokens of the text and of what is generated, at most"),
        Option("--device", "cpu", "cpu or a GPU, such as cuda:0"),
    ),
)
