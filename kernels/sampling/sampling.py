"""Converts logits to distributions, and accepts or rejects draft tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation

# Below this temperature quotients overflow float32; the distribution is one-hot long before that,
# except for exact ties.
LEAST_TEMPERATURE = 1e-30
# A nucleus of at most this many tokens is found without sorting the vocabulary.
_SHORTLIST = 256


def distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """Return the distribution of the next token, [rows, vocab] float32, for logits [rows, vocab] of
    any dtype.

    Temperature is applied first, then top-k (0 for all), then top-p, as by transformers' warpers.
    Top-k keeps ties with the k-th token. Top-p keeps the most likely tokens until their sum reaches
    p, and at least one; which of equal tokens at its edge stay is unspecified. Temperature 0 gives
    the one-hot distribution of the first arg-max. Logits that are not finite give NaN; -inf is
    allowed beside finite ones. Raises ValueError.
    """
    require(
        "distribution",
        logits.dim() == 2
        and logits.stride(1) == 1
        and temperature >= 0
        and top_k >= 0
        and 0 <= top_p <= 1,
        logits=logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    temperature = max(temperature, LEAST_TEMPERATURE) if temperature else 0.0
    return implementation("distribution", logits.device)(logits, temperature, top_k, top_p)


def accept(
    tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply speculative sampling to whole drafts: return how many tokens of each are accepted, and
    the next token.

    tokens: [drafts, n] int64; n may be 0
    draft_probs: [drafts, n, vocab] float32, or None if each is one-hot: its token was certain
    target_probs: [drafts, n + 1, vocab] float32
    coins: [drafts, n + 1] float64 in [0, 1): one for each token, the last for the next token

    Each token x is accepted while coin * q[x] < p[x], for the distribution q it was drawn from and
    the verifier's p (Leviathan et al., 2023; Chen et al., 2023). The next token is drawn from
    norm(max(p - q, 0)) at the first rejected token, else from the p after the draft; it is -1 if
    that distribution is NaN. Returns [drafts] int64 each. Raises ValueError.
    """
    drafts, n = tokens.shape
    vocab = target_probs.shape[-1]
    require(
        "accept",
        target_probs.shape == (drafts, n + 1, vocab)
        and coins.shape == (drafts, n + 1)
        and (tokens.dtype, coins.dtype) == (torch.int64, torch.float64)
        and target_probs.dtype == torch.float32
        and tokens.device == target_probs.device == coins.device
        and target_probs.stride(2) == 1
        and (
            draft_probs is None
            or (
                draft_probs.shape == (drafts, n, vocab)
                and draft_probs.dtype == torch.float32
                and draft_probs.device == tokens.device
                and (n == 0 or draft_probs.stride(2) == 1)
            )
        ),
        tokens=tokens,
        draft_probs=draft_probs,
        target_probs=target_probs,
        coins=coins,
    )
    return implementation("accept", tokens.device)(tokens, draft_probs, target_probs, coins)


def pick(probs: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Draw one token from each row of `probs` [rows, vocab] float32 with a coin for each, [rows]
    float64 in [0, 1). Returns [rows] int64; -1 where the distribution is NaN. A token of
    probability 0 is never drawn. Raises ValueError.
    """
    require(
        "pick",
        probs.dim() == 2
        and coins.shape == probs.shape[:1]
        and (probs.dtype, coins.dtype) == (torch.float32, torch.float64)
        and probs.device == coins.device
        and probs.stride(1) == 1,
        probs=probs,
        coins=coins,
    )
    return implementation("pick", probs.device)(probs, coins)


def reference_distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    logits = logits.float()
    if temperature == 0:
        peak, token = logits.max(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, token, peak - peak + 1)
    scores = logits / temperature
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, -1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    probs = scores.softmax(-1)
    return _nucleus(probs, top_p) if top_p < 1 else probs


def reference_accept(
    tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    n = tokens.shape[-1]
    if draft_probs is None:
        draft_probs = F.one_hot(tokens, target_probs.shape[-1]).float()
    x = tokens.unsqueeze(-1)
    q = draft_probs.gather(-1, x).squeeze(-1).double()
    p = target_probs[:, :n].gather(-1, x).squeeze(-1).double()
    accepted = (coins[:, :n] * q < p).cumprod(-1).sum(-1)
    row = accepted[:, None, None].expand(-1, 1, target_probs.shape[-1])
    p = target_probs.gather(1, row).squeeze(1)
    # After a fully accepted draft there is no q: subtracting a row of zeros leaves p.
    q = F.pad(draft_probs, (0, 0, 0, 1)).gather(1, row).squeeze(1)
    residual = (p - q).clamp_(min=0)
    # Distributions that are equal up to rounding may reject once in millions and leave no residual:
    # then p is correct.
    rest = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return accepted, reference_pick(rest, coins[:, n])


def reference_pick(probs: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution in float64. A token of probability 0 spans nothing."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below_total = torch.minimum(coins * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, below_total.unsqueeze(-1), right=True)
    return tokens.squeeze(-1).masked_fill(total.isnan(), -1)


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the most likely tokens until their sum reaches top_p, renormalised."""
    if probs.device.type != "cpu":
        return _by_order(probs, top_p)
    # Row by row: PyTorch divides the sum of a lone row among threads, and not that of many.
    rows = [_by_shortlist(row, top_p) for row in probs.reshape(-1, 1, probs.shape[-1])]
    return torch.cat(rows).view(probs.shape)


def _by_shortlist(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """`_nucleus` of one row, [1, vocab]. Sorting a whole vocabulary takes a CPU as long as a small
    model's forward, and nearly all of that time is for tokens outside the nucleus.
    """
    if probs.shape[-1] <= _SHORTLIST:
        return _by_order(probs, top_p)
    best = probs.topk(_SHORTLIST + 1, -1).values
    before = best.cumsum(-1) - best
    kept = (before < top_p).sum(-1, keepdim=True)
    least = best.gather(-1, (kept - 1).clamp(min=0))
    # Among equals at the edge the sort decides, as it does in transformers.
    tied = least == best.gather(-1, kept.clamp(max=_SHORTLIST))
    if tied | (kept > _SHORTLIST) | probs.sum(-1, keepdim=True).isnan():
        return _by_order(probs, top_p)
    probs = probs.masked_fill(probs < least, 0)
    return probs / probs.sum(-1, keepdim=True)


def _by_order(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = probs.sort(-1)
    dropped = ordered.cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    probs = probs.masked_fill(dropped.scatter(-1, order, dropped), 0)
    return probs / probs.sum(-1, keepdim=True)
