"""Laws: probability vectors over the vocabulary after temperature, top-k and top-p."""

from __future__ import annotations

import torch

from .params import SamplingParams
from .sizes import LAW_ROWS

_LEAST_TEMPERATURE = 1e-30
"""Below it quotients overflow float32; the law is one-hot long before, up to exact ties."""


_SHORTLIST = 256
"""Most tokens of a nucleus that is found without sorting the vocabulary."""


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
    law = scores.softmax(-1)
    if params.top_p < 1:
        law = _nucleus(law, params.top_p)
    return law


def laws(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """`law` of many rows, a few at a time, so that its temporaries stay small."""
    if logits.shape[0] <= LAW_ROWS:
        return law(logits, params)
    return torch.cat([law(part, params) for part in logits.split(LAW_ROWS)])


def _nucleus(law: torch.Tensor, top_p: float) -> torch.Tensor:
    """The likeliest tokens until their sum reaches top_p, renormalised."""
    if law.device.type == "cpu" and law.shape[-1] > _SHORTLIST:
        # Sorting a whole vocabulary takes the CPU as long as a small model's forward, and nearly
        # all of it is for tokens that fall outside.
        best = law.topk(_SHORTLIST + 1, -1).values
        before = best.cumsum(-1) - best
        kept = (before < top_p).sum(-1, keepdim=True)
        least = best.gather(-1, (kept - 1).clamp(min=0))
        # Among equals at the edge the sort below decides, as it does in transformers.
        tied = least == best.gather(-1, kept.clamp(max=_SHORTLIST))
        if not (tied | (kept > _SHORTLIST) | law.sum(-1, keepdim=True).isnan()).any():
            law = law.masked_fill(law < least, 0)
            return law / law.sum(-1, keepdim=True)
    ordered, order = law.sort(-1)
    dropped = ordered.cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    law = law.masked_fill(dropped.scatter(-1, order, dropped), 0)
    return law / law.sum(-1, keepdim=True)


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
