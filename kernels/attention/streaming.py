"""Attention to one piece of the keys at a time, merged as the pieces come.

Softmax attention over a concatenation of key sets equals the sum of the attentions over each set,
weighted by softmax of their log-sum-exps (Flash-Decoding; Dao et al., 2023). Therefore KV blocks
can stream through a few device slots: a block changes a running state and can then be dropped.

Queries of all heads that share a KV head are packed as rows, so a key is read once per group: row r
of a KV head is token r % tokens of the group's query head r // tokens.

`attend_blocks` and `attend_tail` serve a pass over blocks and the hot tail. `attend_cache` serves a
forward over a short cache, whose end may be known to the device alone. Prefill uses PyTorch's own
operators, in `attention`. No kernel caps scores: plain operations do, some keys at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triforce_kernels.attention.attention import Partial
from triforce_kernels.attention.running import Running
from triforce_kernels.attention.scoring import ScoreBuffer
from triforce_kernels.attention.streaming_reference import (
    add_capped,
    reference_blocks,
    reference_tail,
    seen_keys,
)
from triforce_kernels.checks import alike, require
from triforce_kernels.dispatch import implementation


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
        attend = _kernel("attend_blocks", query, running.cap, reference_blocks)
        attend(running, query, key, value, scores)
        running.fresh = False
        running.keys += blocks * tokens


def attend_tail(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    *,
    end: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    scores: ScoreBuffer | None = None,
) -> Partial:
    """Add the keys that end with the queries' own tokens, and return the whole attention.

    query: [kv_heads, rows, head_dim]; rows are a multiple of `tokens`
    key, value: [kv_heads, tail, head_dim]: all queries see the first tail - tokens keys; the last
        `tokens` keys are the queries' own, of which each query sees those up to itself, or, for a
        tree of drafts, those in `visible`
    end: place of the first of the queries' own keys, [1] int64 on the device, if others may follow
        these: then no address, shape or launch depends on it, and the call can be recorded as part
        of a CUDA graph. Chunks are not scored
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
        and (scores is None or (end is None and scores.fits(kv_heads, rows, 1, tail)))
        and (end is None or (tail > 0 and _is_place(end, query.device, 0)))
        and (visible is None or _is_tree(visible, query, tokens, tail if end is None else None)),
        query=query,
        key=key,
        value=value,
        tokens=tokens,
        acc=running.acc,
        end=end,
        visible=visible,
        scores=scores and scores.out,
    )
    attend = _kernel("attend_tail", query, running.cap, reference_tail)
    return attend(running, query, key, value, tokens, end, visible, scores)


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
    cap: float | None = None,
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
    cap: see `Softmax`

    Raises ValueError.
    """
    (kv_heads, rows, head_dim), capacity = query.shape, key.shape[1]
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
        drafted = tokens if visible is None else visible.shape[1]
        hidden = unseen(end + tokens, drafted, window)
        key, value, end, first = key[:, hidden:], value[:, hidden:], end - hidden, first + hidden
        window = None if end + tokens <= window else window
    if cap is not None:
        key, value = (x if on_device else x[:, : end + tokens] for x in (key, value))
        return _capped(query, key, value, seen_keys(key, tokens, end, window, visible), cap)
    return implementation("attend_cache", query.device)(
        query, key, value, tokens, end, window, first, visible
    )


def unseen(end: int, drafted: int, window: int) -> int:
    """Return how many keys are before the first one that any query sees through a window.

    end: number of keys, of which the last `drafted` are drafts or the queries' own
    """
    return max(0, end - drafted + 1 - window)


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, cap: float
) -> Partial:
    """Attend to keys of which each token sees some, [tokens, keys] bool."""
    running = Running.of(query, cap)
    add_capped(running, query, key, value, seen, None)
    return Partial(running.acc[0].to(query.dtype), running.peak[0])


def _kernel(
    name: str, query: torch.Tensor, cap: float | None, capped: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the implementation of a kernel, or `capped` if scores have a cap."""
    return implementation(name, query.device) if cap is None else capped


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
