"""Attention to one piece of the keys at a time, merged as the pieces come.

Softmax attention over a concatenation of key sets equals the sum of the attentions over each set,
weighted by softmax of their log-sum-exps (Flash-Decoding; Dao et al., 2023). Therefore KV blocks
can stream through a few device slots: a block changes a running state and can then be dropped.

Queries of all heads that share a KV head are packed as rows, so a key is read once per group: row r
of a KV head is token r % tokens of the group's query head r // tokens.

`attend_blocks` and `attend_tail` serve a pass over blocks and the hot tail. `attend_cache` serves a
forward over a short cache, whose end may be known to the device alone. Prefill uses PyTorch's own
operators, in `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from triforce_kernels.attention.scoring import ScoreBuffer, reference_masses
from triforce_kernels.checks import alike, require
from triforce_kernels.dispatch import implementation
from triforce_kernels.limits import ALIGNED_KEYS


@dataclass
class Running:
    """Attention over the keys seen so far, not normalised, in one or more splits.

    acc: [splits, kv_heads, rows, head_dim] sum of exp(score - peak) * value
    peak, total: [splits, kv_heads, rows] greatest score, and sum of exp(score - peak)
    fresh: whether nothing was added yet; the tensors are then uninitialised
    keys: place in the text of the next key

    Tensors are float32, or float64 if the query is. Each split has its own part of every piece of
    keys, so that one sequence fills a GPU; `attend_tail` merges the splits.
    """

    acc: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    fresh: bool = True
    keys: int = 0

    @classmethod
    def of(cls, query: torch.Tensor) -> Running:
        """Return a fresh state for queries [kv_heads, rows, head_dim]."""
        size = (implementation("attention_splits", query.device)(query), *query.shape)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        acc = torch.empty(size, dtype=dtype, device=query.device)
        return cls(acc, acc.new_empty(size[:-1]), acc.new_empty(size[:-1]))


def attend_blocks(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: ScoreBuffer | None = None,
) -> None:
    """Add blocks of keys, all of which every query sees, to `running`, in place.

    query: [kv_heads, rows, head_dim], scaled by head_dim ** -0.5 here
    key, value: [blocks, kv_heads, tokens, head_dim]; zero blocks and zero tokens are allowed
    scores: receives the score of each chunk, see `scoring`

    Keys and values are read once. Blocks added together and one by one change `running` bitwise
    equally. Raises ValueError with every shape, stride, dtype and device if the inputs do not fit
    together.
    """
    kv_heads, rows, head_dim = query.shape
    blocks, _, tokens, _ = key.shape
    require(
        "attend_blocks",
        key.shape == value.shape == (blocks, kv_heads, tokens, head_dim)
        and running.acc.shape[1:] == query.shape
        and running.acc.device == query.device
        and rows > 0
        and alike(query, key, value)
        and (scores is None or scores.fits(kv_heads, rows, blocks, tokens)),
        query=query,
        key=key,
        value=value,
        acc=running.acc,
        scores=scores and scores.out,
    )
    if blocks * tokens:
        implementation("attend_blocks", query.device)(running, query, key, value, scores)
        running.fresh = False
        running.keys += blocks * tokens


def attend_tail(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    *,
    visible: torch.Tensor | None = None,
    scores: ScoreBuffer | None = None,
) -> Partial:
    """Add the keys that end with the queries' own tokens, and return the whole attention.

    query: [kv_heads, rows, head_dim]; rows are a multiple of `tokens`
    key, value: [kv_heads, tail, head_dim]: all queries see the first tail - tokens keys; the last
        `tokens` keys are the queries' own, of which each query sees those up to itself, or, for a
        tree of drafts, those in `visible`
    visible: [tokens, drafted] bool, row: query, column: which of the last `drafted` >= tokens keys
        the query sees; all see the keys before these. A key comes after those before it on its path
    scores: as for `attend_blocks`; chunks that a query does not see get -inf, or nothing is added

    tail = 0 only merges. `running` is invalid afterwards. If a query sees no key at all its output
    is 0 and its log-sum-exp -inf. Raises ValueError.
    """
    kv_heads, rows, head_dim = query.shape
    tail = key.shape[1]
    require(
        "attend_tail",
        key.shape == value.shape == (kv_heads, tail, head_dim)
        and running.acc.shape[1:] == query.shape
        and running.acc.device == query.device
        and 0 < tokens <= rows
        and rows % tokens == 0
        and (tail == 0 or tail >= tokens)
        and alike(query, key, value)
        and (scores is None or scores.fits(kv_heads, rows, 1, tail))
        and (visible is None or _is_tree(visible, query, tokens, tail)),
        query=query,
        key=key,
        value=value,
        tokens=tokens,
        acc=running.acc,
        visible=visible,
        scores=scores and scores.out,
    )
    return implementation("attend_tail", query.device)(
        running, query, key, value, tokens, visible, scores
    )


def attend_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    end: int | torch.Tensor,
    window: int | None = None,
    *,
    first: int = 0,
    visible: torch.Tensor | None = None,
) -> Partial:
    """Compute causal attention of tokens over a cache that already has their keys.

    query: [kv_heads, rows, head_dim]; rows are a multiple of `tokens`
    key, value: [kv_heads, capacity, head_dim] in the query's dtype, or integers in int8; those of
        the queries' tokens are at `end`
    end: a number, or [1] int64 on the device: then no address, shape or launch depends on it, and
        the call can be recorded as part of a CUDA graph
    window: number of keys that each token attends to, its own included; None for all
    first: place in the text of the cache's first key
    visible: as for `attend_tail`. Columns that stand before the first key are ignored if `end` is
        on the device

    Raises ValueError.
    """
    kv_heads, rows, head_dim = query.shape
    capacity = key.shape[1]
    on_device = isinstance(end, torch.Tensor)
    most = None if on_device else end + tokens
    require(
        "attend_cache",
        key.shape == value.shape == (kv_heads, capacity, head_dim)
        and 0 < tokens <= min(rows, capacity)
        and rows % tokens == 0
        and (alike(query, key, value) or (key.dtype == torch.int8 and alike(key, value)))
        and query.device == key.device
        and query.stride(-1) == 1
        and _is_place(end, query.device, capacity - tokens)
        and (window is None or window > 0)
        and (visible is None or _is_tree(visible, query, tokens, most)),
        query=query,
        key=key,
        value=value,
        tokens=tokens,
        end=end,
        window=window,
        visible=visible,
    )
    if window is not None and not on_device:
        # No query sees the keys before the window of the first one.
        drafted = tokens if visible is None else visible.shape[1]
        hidden = max(0, end + tokens - drafted + 1 - window)
        key, value, end, first = key[:, hidden:], value[:, hidden:], end - hidden, first + hidden
        if end + tokens <= window:
            window = None
    return implementation("attend_cache", query.device)(
        query, key, value, tokens, end, window, first, visible
    )


def _is_place(end: int | torch.Tensor, device: torch.device, most: int) -> bool:
    if isinstance(end, torch.Tensor):
        return (end.shape, end.dtype, end.device) == ((1,), torch.int64, device)
    return 0 <= end <= most


def _is_tree(visible: torch.Tensor, query: torch.Tensor, tokens: int, most: int | None) -> bool:
    """most: number of keys; None if only the device knows it"""
    return (
        visible.dtype == torch.bool
        and visible.dim() == 2
        and visible.shape[0] == tokens <= visible.shape[1]
        and (most is None or visible.shape[1] <= most)
        and visible.device == query.device
        and visible.is_contiguous()
    )


def reference_splits(query: torch.Tensor) -> int:
    return 1


def reference_blocks(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: ScoreBuffer | None,
) -> None:
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
    visible: torch.Tensor | None,
    scores: ScoreBuffer | None,
) -> Partial:
    # What all rows see is a block, up to a place that does not depend on the number of rows:
    # operators are faster without a mask.
    own = tokens if visible is None else visible.shape[1]
    if seen := max(0, key.shape[1] - own) // ALIGNED_KEYS * ALIGNED_KEYS:
        reference_blocks(running, query, key[None, :, :seen], value[None, :, :seen], scores)
        key, value = key[:, seen:], value[:, seen:]
        scores = scores and scores.at(scores.first + seen // scores.size)
    if tail := key.shape[1]:
        mask = _tail_mask(query, tokens, tail, visible)
        part = _piece(query, key, value, mask, scores, plain=visible is not None)
        _add(running, part, hides=mask is not None)
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
                seen_keys = window_mask(tokens, end, window, query.device)
            else:
                seen_keys = tree_mask(visible, seen - visible.shape[1], window)
            return partial_attention(query, key, value, mask=_additive(seen_keys, query))
        if tokens == 1:
            return partial_attention(query, key, value)
        # Two calls, since an operator without a mask is faster.
        own = slice(end, seen)
        mask = _tail_mask(query, tokens, tokens, None)
        parts = [partial_attention(query, key[:, own], value[:, own], mask=mask)]
        if end:
            parts.insert(0, partial_attention(query, key[:, :end], value[:, :end]))
        return merge(parts)
    columns = torch.arange(key.shape[1], device=query.device)
    if visible is None:
        last = (end + torch.arange(tokens, device=query.device)).unsqueeze(1)
        seen = columns <= last
        if window is not None:
            seen &= columns > last - window
    else:
        seen = tree_columns(visible, columns - (end + tokens - visible.shape[1]), window)
    mask = _additive(seen, query)
    return partial_attention(query, key.to(query.dtype), value.to(query.dtype), mask=mask)


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
) -> Partial:
    """Compute attention to one piece of keys, and the scores of its chunks. plain: whether to use
    plain operations, which allow a mask that hides everything
    """
    if scores is None and not plain:
        return partial_attention(query, key, value, mask=mask)
    # Only plain operations give the scores of single keys; attention then uses these scores too.
    exact = scaled_scores(query, key)
    if mask is not None:
        exact += mask
    weights, peak = weighed(exact)
    if scores:
        reference_masses(weights, peak, scores)
    return plain_partial(weights, peak, value, weights.dtype)


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
