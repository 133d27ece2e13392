"""Attention of a few queries by the processor's compiled kernels, and the scores of chunks."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from triforce_kernels.attention.attention import Partial
from triforce_kernels.attention.running import Running
from triforce_kernels.attention.streaming_reference import (
    reference_blocks,
    reference_cache,
    reference_splits,
    reference_tail,
)
from triforce_kernels.host.library import library
from triforce_kernels.host.structures import DENSE, Attention
from triforce_kernels.limits import HOST_PARTS

if TYPE_CHECKING:
    from triforce_kernels.attention.scoring import ScoreBuffer

# As in `source/host.h` and `source/attention.h`.
_INT8, _MOST_HEAD_DIM = -1, 1024
# With more rows than this there is work for all threads without dividing the keys.
_WHOLE_ROWS = 64


def splits(query: torch.Tensor) -> int:
    """Return into how many parts the keys of a head are divided. It does not depend on threads or
    rows, and neither do results.
    """
    return max(1, HOST_PARTS // len(query)) if _computes(query) else reference_splits(query)


def blocks(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: ScoreBuffer | None,
) -> None:
    """`streaming.attend_blocks`."""
    if not _computes(query):
        reference_blocks(running, query, key, value, scores)
        return
    _attend(running, query, key, value, scores)


def tail(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    visible: torch.Tensor | None,
    scores: ScoreBuffer | None,
) -> Partial:
    """`streaming.attend_tail`."""
    if not _computes(query):
        return reference_tail(running, query, key, value, tokens, visible, scores)
    if key.shape[1]:
        _attend(running, query, key[None], value[None], scores, own=tokens, visible=visible)
    elif running.fresh:
        lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
        return Partial(torch.zeros_like(query), lse)
    return _merged(running, query)


def cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    end: int | torch.Tensor,
    window: int | None,
    first: int,
    visible: torch.Tensor | None,
) -> Partial:
    """`streaming.attend_cache`."""
    if isinstance(end, torch.Tensor) or not _computes(query):
        return reference_cache(query, key, value, tokens, end, window, first, visible)
    seen = end + tokens
    keys, values = key[None, :, :seen], value[None, :, :seen]
    options = {"own": tokens, "window": window or 0, "visible": visible}
    if query.shape[1] > _WHOLE_ROWS:
        return _attend_whole(query, keys, values, first, **options)
    running = Running.of(query)
    running.keys = first
    _attend(running, query, keys, values, **options)
    return _merged(running, query)


def _computes(query: torch.Tensor) -> bool:
    """Whether the kernels take these queries: not float64, nor heads that are larger than any."""
    return query.dtype in DENSE and query.shape[2] <= _MOST_HEAD_DIM


def _attend(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: ScoreBuffer | None = None,
    **options: Any,
) -> None:
    """Add blocks of keys [blocks, heads, tokens, head_dim] to a state. options: those of `_keys`"""
    wide = query.float()
    call = _call(running, query)
    _keys(call, wide, key, value, running.keys, **options)
    if scores is not None:
        call.scores, call.first_chunk, call.chunk = scores.out.data_ptr(), scores.first, scores.size
        call.scores_head, call.scores_row = scores.out.stride()[:2]
    call.fresh, running.fresh = running.fresh, False
    library().triforce_attend(ctypes.byref(call), torch.get_num_threads())


def _attend_whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, **options: Any
) -> Partial:
    """Return the attention to blocks of keys, without a state."""
    wide, call = query.float(), Attention()
    call.heads, call.rows, call.head_dim = query.shape
    call.splits, call.fresh = splits(query), True
    _keys(call, wide, key, value, first, **options)
    out = torch.empty(query.shape, dtype=torch.float32, device="cpu")
    lse = out.new_empty(query.shape[:2])
    library().triforce_attend_whole(
        ctypes.byref(call), out.data_ptr(), lse.data_ptr(), torch.get_num_threads()
    )
    return Partial(out.to(query.dtype), lse)


def _keys(
    call: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: int,
    *,
    own: int = 0,
    window: int = 0,
    visible: torch.Tensor | None = None,
) -> None:
    """Describe queries in float32 and blocks of keys [blocks, heads, tokens, head_dim]; see
    `source/host.h`. The tensors must outlive the call.
    """
    call.query, call.query_head, call.query_row = query.data_ptr(), *query.stride()[:2]
    call.scale = query.shape[-1] ** -0.5
    call.key, call.value = key.data_ptr(), value.data_ptr()
    call.format = _INT8 if key.dtype == torch.int8 else DENSE[key.dtype]
    call.blocks, call.tokens, call.first_key = len(key), key.shape[2], first
    call.own, call.drafted, call.window = own, own, window
    size = key.itemsize
    call.key_block, call.key_head, call.key_row = (n * size for n in key.stride()[:3])
    call.value_block, call.value_head, call.value_row = (n * size for n in value.stride()[:3])
    if visible is not None:
        call.visible, call.drafted = visible.data_ptr(), visible.shape[1]


def _merged(running: Running, query: torch.Tensor) -> Partial:
    """Return the whole attention that a state holds."""
    out = torch.empty(query.shape, dtype=torch.float32, device="cpu")
    lse = out.new_empty(query.shape[:2])
    call = _call(running, query)
    library().triforce_merge(ctypes.byref(call), out.data_ptr(), lse.data_ptr())
    return Partial(out.to(query.dtype), lse)


def _call(running: Running, query: torch.Tensor) -> Attention:
    call = Attention()
    call.acc, call.peak = running.acc.data_ptr(), running.peak.data_ptr()
    call.total, call.splits = running.total.data_ptr(), len(running.acc)
    call.heads, call.rows, call.head_dim = query.shape
    return call
