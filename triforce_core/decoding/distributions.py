"""Distributions: probability vectors over the vocabulary after temperature, top-k and top-p."""

from __future__ import annotations

import torch

from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.penalties import changed
from triforce_core.decoding.trees.prefixes import Prefixes
from triforce_core.params import SamplingParams
from triforce_core.plan.levels import DISTRIBUTION_ROWS
from triforce_kernels.dispatch import TRITON, backend
from triforce_kernels.sampling import sampling

# Logits of levels that draft are limited to this magnitude.
MOST_LOGIT = 1e30


def limited(logits: torch.Tensor) -> torch.Tensor:
    """Replace logits that are not finite, in place, so that every row is a distribution. Drafts
    alone are drawn from it: whatever a draft level computes, it may not fail a request.
    """
    return logits.nan_to_num_(0.0, MOST_LOGIT, -MOST_LOGIT)


def conditioned(
    logits: torch.Tensor, params: SamplingParams, text: Text, after: Prefixes | None = None
) -> torch.Tensor:
    """Return logits [rows, vocab] after what depends on the text, see `penalties.changed`.

    after: the tokens behind the text that each row follows; None for none
    """
    if not params.changes_logits:
        return logits
    if after is None:
        after = Prefixes(logits.new_empty(0, dtype=torch.int64), [()] * len(logits))
    return changed(logits, params, text, after)


def distributions(
    logits: torch.Tensor,
    params: SamplingParams,
    text: Text | None = None,
    after: Prefixes | None = None,
) -> torch.Tensor:
    """Return the probabilities of the next token, float32, for each row of logits [rows, vocab].

    Applies `conditioned`, then `sampling.distribution`, then min_p. The PyTorch reference
    processes a few rows at a time to keep its temporaries small; the kernel has no temporaries.

    text, after: see `conditioned`; without a text, logits are taken as they are
    """
    if text is not None:
        logits = conditioned(logits, params, text, after)
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
    """Drop tokens whose probability is below min_p times the highest (Nguyen et al., 2024)."""
    if not params.min_p:
        return probs
    probs = probs.where(probs >= params.min_p * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one token from each row of `probs` [rows, vocab], with one coin per row.

    Returns [rows] int64. A token of probability 0 is never drawn. A row that contains NaN gives -1.
    """
    coins = torch.rand(
        probs.shape[0], dtype=torch.float64, device=probs.device, generator=generator
    )
    return sampling.pick(probs, coins)
