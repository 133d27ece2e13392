"""What benchmarks of drafters with files of their own have in common: they train one for
SmolLM2-135M, and draft with it over an EMULATED link as `bench.mtp_head` does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.make_shallow_draft import make_shallow_draft
from bench.material import model_file
from bench.mtp_head import LAYERS, compare
from frame import Figures

# Trains a drafter for the model of a directory, writes it to another, given a number of tokens and
# of seconds.
Train = Callable[[Path, Path, int, float], Iterator[Figures]]


def measure(args: argparse.Namespace, kind: str, train: Train) -> Iterator[Figures]:
    """Train a drafter, if the directory has none, and compare it with other ways to draft.

    kind: what it is called in the figures
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(args.directory or folder)
        model, drafter = directory / "model", directory / "drafter"
        if not drafter.exists():
            directory.mkdir(parents=True, exist_ok=True)
            make_shallow_draft(model_file(), model, LAYERS, torch.bfloat16)
            yield from train(model, drafter, args.training_tokens, args.minutes * 60)
        yield from compare(model, args, _ways(kind, drafter))


def _ways(kind: str, drafter: Path) -> dict[str, dict[str, Any]]:
    speculative = {"method": "speculative", "draft": str(drafter)}
    return {
        "plain": {"method": "autoregressive"},
        "n-grams": {"method": "speculative", "draft": "ngram"},
        f"{kind}, chains": {**speculative, "tree": "off"},
        f"{kind}, trees": {**speculative, "tree": 24},
        kind: speculative,
        "retrieval level, n-grams": {"draft": "ngram", "budget": 1024},
        f"retrieval level, {kind}": {"draft": str(drafter), "budget": 1024},
    }


@torch.no_grad()
def tapped_states(
    model: torch.nn.Module, ids: torch.Tensor, taps: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states that enter the tapped layers, side by side, and the last ones, over
    pieces of 1,024 tokens.
    """
    tapped, last = [], []
    for piece in ids.split(1024):
        states = model.model(piece[None], output_hidden_states=True).hidden_states
        tapped.append(torch.cat([states[tap][0] for tap in taps], 1))
        last.append(states[-1][0])
    return torch.cat(tapped), torch.cat(last)
