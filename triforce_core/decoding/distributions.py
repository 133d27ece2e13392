"""Distributions: probability vectors over the vocabulary after temperature, top-k and top-p."""

from __future__ import annotations

import torch

from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.penalties import changed
from triforce_core.params import SamplingParams
from triforce_core.plan.levels import DISTRIBUTION_ROWS
from triforce_kernels.dispatch import TRITON, backend
from triforce_kernels.sampling import sampling


def distributions(
    logits: torch.Tensor,
    params: SamplingParams,
    text: Text | None = None,
    drawn: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the probabilities of the next token, float32, for each row of logits [rows, vocab]:
    `penalties.changed`, then `sampling.distribution`, then min_p.

    text, drawn: what each row follows; see `penalties.changed`
    The reference takes a few rows at a time, so that its temporaries stay small; a kernel has none.
    """
    if params.changes_logits and text is not None:
        logits = changed(logits, params, text, drawn)
    if backend(logits.device) == TRITON:
        return _least(
            sampling.distribution(logits, params.temperature, params.top_k, params.top_p), params
        )
    parts = [
        _least(sampling.distribution(part, params.temperature, params.top_k, params.top_p), params)
        for part in logits.split(DISTRIBUTION_ROWS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _least(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Without what is less likely than min_p of the likeliest (Nguyen et al., 2024)."""
    if not params.min_p:
        return probs
    probs = probs.where(probs >= params.min_p * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token of each row of `distribution` [rows, vocab], as [rows] of int64, one coin a row.

    A token of probability 0 is never drawn. A distribution that is not a number gives -1.
    """
    coins = torch.rand(
        probs.shape[0], dtype=torch.float64, device=probs.device, generator=generator
    )
    return sampling.pick(probs, coins)
