"""Attention of a few queries by the processor's compiled kernels, and the scores of chunks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

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
_INT8, MOST_HEAD_DIM = -1, 1024
# With more rows than this there is work for all threads without dividing the keys.
_WHOLE_ROWS = 64


def splits(query: torch.Tensor) -> int:
    """`parts`, or those of a reference."""
    return parts(query.shape[0]) if _computes(query) else reference_splits(query)


def parts(kv_heads: int) -> int:
    """Return into how many parts the keys of a head are divided. It does not depend on threads or
    rows, and neither do results.
    """
    return max(1, HOST_PARTS // kv_heads)


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
    call = _call(running, query)
    describe_keys(call, key, value, running.keys)
    _scores(call, scores)
    library().triforce_attend(ctypes.byref(call), None, None, torch.get_num_threads())
    running.fresh = False


def tail(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    end: torch.Tensor | None,
    visible: torch.Tensor | None,
    scores: ScoreBuffer | None,
) -> Partial:
    """`streaming.attend_tail`."""
    if end is not None:
        # The device is the host.
        key, value, end = key[:, : int(end) + tokens], value[:, : int(end) + tokens], None
    if not _computes(query):
        return reference_tail(running, query, key, value, tokens, end, visible, scores)
    if running.fresh and not key.shape[1]:
        lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
        return Partial(torch.zeros_like(query), lse)
    call = _call(running, query)
    describe_keys(call, key[None], value[None], running.keys)
    describe_own(call, tokens, 0, visible)
    _scores(call, scores)
    running.fresh = False
    return _answer(library().triforce_attend, call, query)


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
    call, attend = _described(query), library().triforce_attend
    call.splits, call.fresh = splits(query), True
    if query.shape[1] > _WHOLE_ROWS:
        attend = library().triforce_attend_whole
    else:
        places = call.splits * call.heads * call.rows
        state = torch.empty(places * (call.head_dim + 2), dtype=torch.float32, device="cpu")
        call.acc = state.data_ptr()
        call.peak = call.acc + places * call.head_dim * state.itemsize
        call.total = call.peak + places * state.itemsize
    describe_keys(call, key[None], value[None], first)
    call.tokens = end + tokens
    describe_own(call, tokens, window or 0, visible)
    return _answer(attend, call, query)


def _computes(query: torch.Tensor) -> bool:
    """Whether the kernels take these queries: not float64, nor heads that are larger than any."""
    return query.dtype in DENSE and query.shape[2] <= MOST_HEAD_DIM


def _described(query: torch.Tensor) -> Attention:
    """Describe queries, in float32."""
    call, wide = Attention(), query.float()
    # The kernel reads them by their address.
    call.keeps = wide
    call.heads, call.rows, call.head_dim = query.shape
    call.query, call.query_head, call.query_row = wide.data_ptr(), *wide.stride()[:2]
    call.scale = query.shape[2] ** -0.5
    return call


def _call(running: Running, query: torch.Tensor) -> Attention:
    """Describe queries and their state."""
    call = _described(query)
    call.acc, call.peak = running.acc.data_ptr(), running.peak.data_ptr()
    call.total, call.splits = running.total.data_ptr(), running.acc.shape[0]
    call.fresh = running.fresh
    return call


def describe_keys(call: Attention, key: torch.Tensor, value: torch.Tensor, first: int) -> None:
    """Describe blocks of keys [blocks, heads, tokens, head_dim]; see `source/host.h`. first: place
    in the text of the first key
    """
    call.key, call.value = key.data_ptr(), value.data_ptr()
    call.format = _INT8 if key.dtype == torch.int8 else DENSE[key.dtype]
    call.blocks, call.tokens, call.first_key = key.shape[0], key.shape[2], first
    size = key.itemsize
    call.key_block, call.key_head, call.key_row = (n * size for n in key.stride()[:3])
    call.value_block, call.value_head, call.value_row = (n * size for n in value.stride()[:3])


def describe_own(call: Attention, tokens: int, window: int, visible: torch.Tensor | None) -> None:
    """Describe which keys at the end the rows see: `tokens` are their own."""
    call.own, call.drafted, call.window = tokens, tokens, window
    # A structure that describes one forward after the other keeps nothing of a tree.
    call.visible = None
    if visible is not None:
        call.visible, call.drafted = visible.data_ptr(), visible.shape[1]


def _scores(call: Attention, scores: ScoreBuffer | None) -> None:
    if scores is not None:
        call.scores, call.first_chunk, call.chunk = scores.out.data_ptr(), scores.first, scores.size
        call.scores_head, call.scores_row = scores.out.stride()[:2]


def _answer(attend: Callable[..., None], call: Attention, query: torch.Tensor) -> Partial:
    """Attend, and return the whole attention."""
    out = torch.empty(query.shape, dtype=torch.float32, device="cpu")
    lse = out.new_empty(query.shape[:2])
    attend(ctypes.byref(call), out.data_ptr(), lse.data_ptr(), torch.get_num_threads())
    return Partial(out.to(query.dtype), lse)
