"""Attention to one piece of the keys at a time (`streaming`) in PyTorch's operations.

Scores with a cap are always computed here, some keys at a time: no kernel caps them.
"""

from __future__ import annotations

import torch

from triforce_kernels.attention.attention import (
    Partial,
    attention_to_blocks,
    merge,
    partial_attention,
    plain_partial,
    scaled_scores,
    weighed,
)
from triforce_kernels.attention.masks import tree_columns, tree_mask, window_mask
from triforce_kernels.attention.running import Running
from triforce_kernels.attention.scoring import ScoreBuffer, reference_masses
from triforce_kernels.limits import ALIGNED_KEYS, CAPPED_KEYS


def reference_splits(query: torch.Tensor) -> int:
    return 1


def reference_blocks(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: ScoreBuffer | None,
) -> None:
    if running.cap is not None:
        for keys, values in zip(key, value, strict=True):
            scores = add_capped(running, query, keys, values, None, scores)
        return
    if scores is None:
        for part in attention_to_blocks(query, key, value):
            _add(running, part, hides=False)
        return
    for keys, values in zip(key, value, strict=True):
        _add(running, _piece(query, keys, values, None, scores), hides=False)
        scores = scores.at(scores.first + keys.shape[1] // scores.size)


def reference_tail(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    end: torch.Tensor | None,
    visible: torch.Tensor | None,
    scores: ScoreBuffer | None,
) -> Partial:
    if end is not None:
        mask = _additive(seen_keys(key, tokens, end, None, visible), query)
        part = _piece(query, key, value, mask, None, plain=True, cap=running.cap)
        _add(running, part, hides=True)
        return Partial(running.acc[0].to(query.dtype), running.peak[0])
    # What all rows see is a block, up to a place that does not depend on the number of rows:
    # operators are faster without a mask.
    own = tokens if visible is None else visible.shape[1]
    if seen := max(0, key.shape[1] - own) // ALIGNED_KEYS * ALIGNED_KEYS:
        reference_blocks(running, query, key[None, :, :seen], value[None, :, :seen], scores)
        key, value = key[:, seen:], value[:, seen:]
        scores = scores and scores.at(scores.first + seen // scores.size)
    if tail := key.shape[1]:
        mask = _tail_mask(query, tokens, tail, visible)
        if running.cap is None:
            part = _piece(query, key, value, mask, scores, plain=visible is not None)
            _add(running, part, hides=mask is not None)
        else:
            add_capped(running, query, key, value, mask, scores)
    if running.fresh:
        return Partial(torch.zeros_like(query), torch.full_like(running.peak[0], float("-inf")))
    return Partial(running.acc[0].to(query.dtype), running.peak[0])


def reference_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    end: int | torch.Tensor,
    window: int | None,
    first: int,
    visible: torch.Tensor | None,
) -> Partial:
    if isinstance(end, int):
        seen = end + tokens
        key, value = key[:, :seen].to(query.dtype), value[:, :seen].to(query.dtype)
        if visible is not None or window is not None:
            if visible is None:
                shown = window_mask(tokens, end, window, query.device)
            else:
                shown = tree_mask(visible, seen - visible.shape[1], window)
            return partial_attention(query, key, value, mask=_additive(shown, query))
        if tokens == 1:
            return partial_attention(query, key, value)
        # Two calls, since an operator without a mask is faster.
        own = slice(end, seen)
        mask = _tail_mask(query, tokens, tokens, None)
        parts = [partial_attention(query, key[:, own], value[:, own], mask=mask)]
        if end:
            parts.insert(0, partial_attention(query, key[:, :end], value[:, :end]))
        return merge(parts)
    seen = seen_keys(key, tokens, end, window, visible)
    mask = _additive(seen, query)
    return partial_attention(query, key.to(query.dtype), value.to(query.dtype), mask=mask)


def seen_keys(
    key: torch.Tensor,
    tokens: int,
    end: int | torch.Tensor,
    window: int | None,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """Return which keys of a cache each token sees, [tokens, keys] bool."""
    columns = torch.arange(key.shape[1], device=key.device)
    if visible is not None:
        return tree_columns(visible, columns - (end + tokens - visible.shape[1]), window)
    last = (end + torch.arange(tokens, device=key.device)).unsqueeze(1)
    seen = columns <= last
    return seen if window is None else seen & (columns > last - window)


def _additive(seen: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a mask [tokens, keys] bool as additive [rows, keys] of the query's dtype."""
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
    return mask.masked_fill_(~seen, float("-inf")).repeat(query.shape[1] // len(seen), 1)


def _piece(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: ScoreBuffer | None,
    plain: bool = False,
    cap: float | None = None,
) -> Partial:
    """Compute attention to one piece of keys, and the scores of its chunks. plain: whether to use
    plain operations, which allow a mask that hides everything
    """
    if scores is None and cap is None and not plain:
        return partial_attention(query, key, value, mask=mask)
    # Only plain operations give the scores of single keys; attention then uses these scores too.
    exact = scaled_scores(query, key, cap)
    if mask is not None:
        exact += mask
    weights, peak = weighed(exact)
    if scores:
        reference_masses(weights, peak, scores)
    return plain_partial(weights, peak, value, weights.dtype)


def add_capped(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: ScoreBuffer | None,
) -> ScoreBuffer | None:
    """Add keys whose scores have a cap, some at a time. Return the buffer for the next keys.

    mask: additive [rows, keys], or which keys each token sees, [tokens, keys] bool
    """
    for start in range(0, key.shape[1], CAPPED_KEYS):
        piece = slice(start, min(start + CAPPED_KEYS, key.shape[1]))
        hidden = None if mask is None else mask[:, piece]
        if hidden is not None and hidden.dtype == torch.bool:
            hidden = _additive(hidden, query)
        keys, values = key[:, piece], value[:, piece]
        part = _piece(query, keys, values, hidden, scores, cap=running.cap)
        _add(running, part, hides=hidden is not None)
        scores = scores and scores.at(scores.first + -(-keys.shape[1] // scores.size))
    return scores


def _add(running: Running, part: Partial, *, hides: bool) -> None:
    """Merge a part. The state is normalised here: its peak is a log-sum-exp, its total 1.

    hides: whether some query may see no key of the part
    """
    out = part.out.to(running.acc.dtype)
    if running.fresh:
        running.acc, running.peak, running.fresh = out[None], part.lse[None], False
        return
    before = running.peak[0]
    share = (part.lse - before).sigmoid_()
    if hides:
        # A part without a visible key counts for nothing, even if no key was visible before.
        share.masked_fill_(part.lse == float("-inf"), 0)
    running.acc[0].lerp_(out, share.unsqueeze(-1))
    running.peak = torch.logaddexp(before, part.lse)[None]


def _tail_mask(
    query: torch.Tensor, tokens: int, tail: int, visible: torch.Tensor | None
) -> torch.Tensor | None:
    """Return an additive [rows, tail] mask in the query's dtype; None hides nothing."""
    if tokens == 1 and visible is None:
        return None
    mask = torch.full((tokens, tail), float("-inf"), dtype=query.dtype, device=query.device)
    if visible is None:
        mask.triu_(tail - tokens + 1)
    else:
        before = tail - visible.shape[1]
        mask[:, :before] = 0
        mask[:, before:].masked_fill_(visible, 0)
    return mask.repeat(query.shape[1] // tokens, 1)
