"""Measure how well a model's first layers draft for the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from triforce_core.decoding.draft_length import LEAST_GAIN

# The longest draft that is considered.
MOST_DRAFT_TOKENS = 16
# The number of positions whose distributions are computed together.
_ROWS = 64


@dataclass(frozen=True)
class Depth:
    """The first `layers` layers as a drafter.

    acceptance: the probability that a draft token is accepted at temperature 1, averaged over a
        text: the sum over the vocabulary of min(p, q) (Leviathan et al., 2023)
    agreement: the share of positions at which both have the same most likely token
    cost: the cost of drafting one token, in forwards of the whole model
    """

    layers: int
    acceptance: float
    agreement: float
    cost: float

    @property
    def draft_tokens(self) -> int:
        """The draft length with the highest gain, or 0 if no length gains."""
        return max(range(MOST_DRAFT_TOKENS + 1), key=self._gain)

    @property
    def gain(self) -> float:
        """How many times faster decoding is than without drafts.

        It assumes one device, where a forward takes as long as reading the weights.
        """
        return self._gain(self.draft_tokens)

    def _gain(self, tokens: int) -> float:
        given = sum(self.acceptance**i for i in range(tokens + 1))
        return given / (1 + tokens * self.cost)


def candidates(layers: int) -> list[int]:
    """Return the depths to try for a model: a few small ones, then eighths of its layers."""
    eighths = (layers * i // 8 for i in range(1, 8))
    return sorted({d for d in (1, 2, 4, *eighths) if 1 <= d < layers})


def best(depths: Sequence[Depth]) -> Depth | None:
    """Return the depth with the highest gain, or None if `auto` would draft with none of them."""
    worth = [depth for depth in depths if depth.gain >= LEAST_GAIN]
    return max(worth, key=lambda depth: depth.gain, default=None)


@torch.inference_mode()
def measure(path: Path, tokens: Sequence[int], depths: Sequence[int]) -> list[Depth]:
    """Measure depths on a text. path: the model, which is loaded into memory. tokens: the text"""
    from transformers import AutoModelForCausalLM

    if path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, dtype=torch.float32
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, trust_remote_code=False, gguf_file=path.name, dtype=torch.float32
        )
    ends = _parameters(model.lm_head)
    layer = _parameters(model.model.layers[0])
    whole = ends + layer * len(model.model.layers)
    *states, normed = model.model(
        torch.tensor([list(tokens)]), output_hidden_states=True
    ).hidden_states
    # transformers applies the final norm to the last hidden state only.
    outputs = [*(model.model.norm(state[0]) for state in states), normed[0]]
    found = []
    for depth in depths:
        accepted = agreed = 0.0
        for first in range(0, len(tokens), _ROWS):
            rows = slice(first, first + _ROWS)
            law = model.lm_head(outputs[-1][rows]).float().softmax(-1)
            drawn_from = model.lm_head(outputs[depth][rows]).float().softmax(-1)
            accepted += float(torch.minimum(law, drawn_from).sum())
            agreed += float((law.argmax(-1) == drawn_from.argmax(-1)).sum())
        share = 1 / len(tokens)
        cost = (ends + layer * depth) / whole
        found.append(Depth(depth, accepted * share, agreed * share, cost))
    return found


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
