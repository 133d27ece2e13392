"""From logits to laws, and from a draft and two laws to what holds of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation

# Below this temperature quotients overflow float32; the law is one-hot long before, up to exact
# ties.
LEAST_TEMPERATURE = 1e-30
# A nucleus of so many tokens at most is found without sorting the vocabulary.
_SHORTLIST = 256


def law(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The law of the next token, [rows, vocab] float32, of logits [rows, vocab] of any dtype.

    Temperature, then top-k (0 for all), then top-p, as transformers' warpers apply them: top-k
    keeps ties with the k-th, top-p keeps the likeliest tokens until their sum reaches p, and never
    none; which of equals at its edge stay is left open. Temperature 0 is the one-hot law of the
    first arg-max. Logits that are not finite give a law that is not a number; -inf is fine beside
    finite ones. Raises ValueError.
    """
    require(
        "law",
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
    return implementation("law", logits.device)(logits, temperature, top_k, top_p)


def accept(
    tokens: torch.Tensor,
    draft_laws: torch.Tensor | None,
    target_laws: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling of whole drafts: how many of a draft's tokens hold, and what follows.

    tokens: [drafts, n] int64; n may be 0
    draft_laws: [drafts, n, vocab] float32, or None where each is one-hot: its token was sure
    target_laws: [drafts, n + 1, vocab] float32
    coins: [drafts, n + 1] float64 in [0, 1): one for each token, the last for the one that follows

    Each token x holds while coin * q[x] < p[x], for the law q it was drawn from and the verifier's
    p (Leviathan et al., 2023; Chen et al., 2023). What follows is drawn from norm(max(p - q, 0)) at
    the first that does not, else from the p behind the draft; -1 if that is not a number.
    Returns [drafts] int64 each. Raises ValueError.
    """
    drafts, n = tokens.shape
    vocab = target_laws.shape[-1]
    require(
        "accept",
        target_laws.shape == (drafts, n + 1, vocab)
        and coins.shape == (drafts, n + 1)
        and (tokens.dtype, coins.dtype) == (torch.int64, torch.float64)
        and target_laws.dtype == torch.float32
        and tokens.device == target_laws.device == coins.device
        and target_laws.stride(2) == 1
        and (
            draft_laws is None
            or (
                draft_laws.shape == (drafts, n, vocab)
                and draft_laws.dtype == torch.float32
                and draft_laws.device == tokens.device
                and (n == 0 or draft_laws.stride(2) == 1)
            )
        ),
        tokens=tokens,
        draft_laws=draft_laws,
        target_laws=target_laws,
        coins=coins,
    )
    return implementation("accept", tokens.device)(tokens, draft_laws, target_laws, coins)


def pick(law: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One token of each row of `law` [rows, vocab] float32, by a coin each, [rows] float64 in
    [0, 1), as [rows] int64; -1 where the law is not a number. A token of probability 0 is never
    drawn. Raises ValueError.
    """
    require(
        "pick",
        law.dim() == 2
        and coins.shape == law.shape[:1]
        and (law.dtype, coins.dtype) == (torch.float32, torch.float64)
        and law.device == coins.device
        and law.stride(1) == 1,
        law=law,
        coins=coins,
    )
    return implementation("pick", law.device)(law, coins)


def reference_law(
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
    law = scores.softmax(-1)
    return _nucleus(law, top_p) if top_p < 1 else law


def reference_accept(
    tokens: torch.Tensor,
    draft_laws: torch.Tensor | None,
    target_laws: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    n = tokens.shape[-1]
    if draft_laws is None:
        draft_laws = F.one_hot(tokens, target_laws.shape[-1]).float()
    x = tokens.unsqueeze(-1)
    q = draft_laws.gather(-1, x).squeeze(-1).double()
    p = target_laws[:, :n].gather(-1, x).squeeze(-1).double()
    accepted = (coins[:, :n] * q < p).cumprod(-1).sum(-1)
    row = accepted[:, None, None].expand(-1, 1, target_laws.shape[-1])
    p = target_laws.gather(1, row).squeeze(1)
    # After a draft that holds wholly there is no q: subtracting a row of zeros leaves p.
    q = F.pad(draft_laws, (0, 0, 0, 1)).gather(1, row).squeeze(1)
    residual = (p - q).clamp_(min=0)
    # Laws equal up to rounding may reject once in millions and leave no residual: p is right then.
    rest = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return accepted, reference_pick(rest, coins[:, n])


def reference_pick(law: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """By inverting the cumulative law in float64: what has no probability spans nothing."""
    cumulative = law.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below_total = torch.minimum(coins * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, below_total.unsqueeze(-1), right=True)
    return tokens.squeeze(-1).masked_fill(total.isnan(), -1)


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
