"""Scores of chunks of keys: what a retrieval cache is chosen by, computed while keys pass through.

A chunk is `chunk` consecutive keys; the last one of a piece may be shorter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def chunk_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    chunk: int,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The share of each row's attention that each chunk of keys takes, relative to `lse`.

    query: [kv_heads, rows, head_dim]; key: [kv_heads, tokens, head_dim]
    lse: [kv_heads, rows] float32, of `partial_attention` over the same keys: shares sum to 1
    mask: additive [rows, tokens], as in `partial_attention`
    Returns [kv_heads, rows, chunks] float32.
    """
    scores = (query @ key.transpose(-1, -2)).float().mul_(query.shape[-1] ** -0.5)
    if mask is not None:
        scores += mask
    shares = scores.sub_(lse.unsqueeze(-1)).exp_()
    return _chunks(shares, chunk).sum(-1)


def chunk_mean(query: torch.Tensor, key: torch.Tensor, chunk: int) -> torch.Tensor:
    """Query times the mean key of each chunk, scaled: [kv_heads, rows, chunks] float32.

    The score of the published TriForce (Sun et al., 2024).
    """
    keys = _chunks(key.transpose(-1, -2), chunk)
    sizes = torch.full((keys.shape[-2],), chunk, dtype=torch.float32, device=key.device)
    sizes[-1] -= -key.shape[1] % chunk
    means = keys.float().sum(-1) / sizes
    return query.float() @ means * query.shape[-1] ** -0.5


def _chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[..., tokens] as [..., chunks, chunk], filled up with zeros."""
    if rest := -x.shape[-1] % chunk:
        x = F.pad(x, (0, rest))
    return x.unflatten(-1, (-1, chunk))
