"""Causal attention of many rows of a text at once, in a prefill."""

from __future__ import annotations

import torch

from triforce_kernels import same_bits
from triforce_kernels.attention.attention import Partial, merge, partial_attention
from triforce_kernels.attention.masks import window_mask
from triforce_kernels.attention.streaming import attend_cache
from triforce_kernels.limits import CAPPED_ROWS, WINDOW_ROWS


def attend_text(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None = None,
    *,
    first: int = 0,
    cap: float | None = None,
) -> Partial:
    """Compute the attention of the last rows of a text to all of it, causally.

    query: [heads, rows, head_dim]
    key, value: [kv_heads, tokens, head_dim] in the query's dtype, of which the last `rows` are the
        rows' own
    window: number of keys that each row attends to, its own included; None for all
    first: place in the text of the first key
    cap: see `Softmax`

    A processor's compiled kernels give a row the bits that it has in a pass (`attend_cache`), if
    that is wanted (`same_bits`); else these are PyTorch's operators.

    Returns [heads, rows, head_dim] and [heads, rows].
    Raises ValueError.
    """
    heads, rows, head_dim = query.shape
    kv_heads, tokens, _ = key.shape
    if cap is not None:
        return _capped(query, key, value, window, cap)
    if same_bits.wanted() and same_bits.can_hold(query.device, query.dtype):
        packed = query.reshape(kv_heads, heads // kv_heads * rows, head_dim)
        part = attend_cache(packed, key, value, rows, tokens - rows, window, first=first)
        return Partial(part.out.view(query.shape), part.lse.view(query.shape[:2]))
    if window is not None:
        return _windowed(query, key, value, window)
    start = tokens - rows
    own = (x[:, start:].repeat_interleave(heads // kv_heads, 0) for x in (key, value))
    partials = [partial_attention(query, *own, causal=True)]
    if start:
        packed = query.reshape(kv_heads, heads // kv_heads * rows, head_dim)
        past = partial_attention(packed, key[:, :start], value[:, :start])
        partials.append(Partial(past.out.reshape(query.shape), past.lse.reshape(query.shape[:2])))
    return merge(partials)


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, cap: float
) -> Partial:
    """`attend_text` with a cap, some rows at a time."""
    _, rows, head_dim = query.shape
    kv_heads, before, parts = key.shape[0], key.shape[1] - rows, []
    for start in range(0, rows, CAPPED_ROWS):
        some = query[:, start : start + CAPPED_ROWS]
        packed = some.reshape(kv_heads, -1, head_dim)
        part = attend_cache(packed, key, value, some.shape[1], before + start, window, cap=cap)
        parts.append(Partial(part.out.view(some.shape), part.lse.view(some.shape[:2])))
    return Partial(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))


def _windowed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> Partial:
    """`attend_text` with a window, some rows at a time."""
    heads, rows, _ = query.shape
    kv_heads, tokens, _ = key.shape
    before, at_once = tokens - rows, max(window, WINDOW_ROWS)
    parts = []
    for start in range(0, rows, at_once):
        end = min(start + at_once, rows)
        first = max(0, before + start + 1 - window)
        span = slice(first, before + end)
        own = [each[:, span].repeat_interleave(heads // kv_heads, 0) for each in (key, value)]
        if before + end <= window and not before + start:
            parts.append(partial_attention(query[:, start:end], *own, causal=True))
            continue
        seen = window_mask(end - start, before + start - first, window, query.device)
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(~seen, float("-inf"))
        parts.append(partial_attention(query[:, start:end], *own, mask=mask))
    return Partial(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))
