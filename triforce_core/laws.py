"""Laws: probability vectors over the vocabulary after temperature, top-k and top-p."""

from __future__ import annotations

import torch

from .params import SamplingParams

_LEAST_TEMPERATURE = 1e-30
"""Below it quotients overflow float32; the law is one-hot long before, up to exact ties."""


def law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The law of the next token, float32, of each row of logits [..., vocab].

    Temperature, then top-k, then top-p, as transformers' warpers apply them: top-k keeps ties with
    the k-th, top-p keeps the likeliest tokens until their sum reaches p, and never none.
    Temperature 0 is the one-hot law of the (first) arg-max. Logits that are not finite give a law
    that is not a number.
    """
    logits = logits.float()
    if params.temperature == 0:
        peak, token = logits.max(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, token, peak - peak + 1)
    scores = logits / max(params.temperature, _LEAST_TEMPERATURE)
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k, -1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if params.top_p < 1:
        ordered, order = scores.sort(-1)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
        dropped[..., -1] = False
        scores = scores.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))
    return scores.softmax(-1)


def draw(law: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token of each row of `law` [rows, vocab], as [rows] of int64.

    By inverting the cumulative law in float64, one coin a row: a token of probability 0 spans
    nothing and is never drawn. A law that is not a number gives -1.
    """
    cumulative = law.double().cumsum(-1)
    total = cumulative[:, -1:]
    coins = torch.rand(
        (law.shape[0], 1), dtype=torch.float64, device=law.device, generator=generator
    )
    below_total = torch.minimum(coins * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, below_total, right=True)
    return tokens.masked_fill(total.isnan(), -1).squeeze(-1)
