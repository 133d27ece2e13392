"""`streaming` on a GPU: one program for each KV head, split of its keys and tile of its queries."""

from __future__ import annotations

from functools import cache as cached
from typing import Any, NamedTuple

import torch

from triforce_kernels import same_bits
from triforce_kernels.attention.attend_triton import attend_kernel, merge_kernel
from triforce_kernels.attention.attention import Partial
from triforce_kernels.attention.running import Running
from triforce_kernels.attention.scoring import ScoreBuffer
from triforce_kernels.attention.streaming_reference import (
    reference_blocks,
    reference_cache,
    reference_splits,
    reference_tail,
)
from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.limits import MOST_SPLITS, WHOLE_ROWS

_PROGRAMS_PER_PROCESSOR = 2
# More keys than any cache has.
_ALL_KEYS = 1 << 30
# Queries of a tile where a query is to have the same bits beside any others.
_SAME_ROWS = 64
# Larger heads, of latent attention, have tiles of their own, and in float32 no kernel: keys and
# values of one tile do not fit.
_WIDEST = 512
# Queries that a program merges.
_MERGED_ROWS = 16


class Tile(NamedTuple):
    """Queries and keys that a program processes at once, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile(rows: int, head_dim: int, itemsize: int) -> Tile:
    """Choose tiles so that keys and values of two tiles load at once within the 99 KiB of shared
    memory that a program has on an RTX 3090 or 4090, and nothing spills from registers; of large
    heads one tile, and some variants spill. Where a row is to have the same bits beside any others,
    the number of rows does not matter.

    float32 is multiplied exactly, without tensor cores, from registers, so its tiles are small.
    """
    width = next_power_of_2(head_dim)
    if same_bits.wanted():
        rows = _SAME_ROWS
    if itemsize == 4:
        most, keys = (32, 32) if width <= 64 else (16, 16)
    else:
        most, keys = (128 if width <= 128 else 64), (64 if width <= 128 else 32)
    count = min(most, max(16, next_power_of_2(rows)))
    if width > 256:
        count, keys = min(count, 32), 16
    if count == 128:
        keys = 32
    if width > _WIDEST:
        # Of latent attention. Some variants spill up to 352 bytes a thread.
        return Tile(16, 16, 8, 1)
    return Tile(count, keys, 8 if count * width >= 64 * 128 else 4, 2)


def splits(query: torch.Tensor) -> int:
    """Return the number of splits of the keys: enough to fill the device."""
    kv_heads, rows, head_dim = query.shape
    if not _computes(query):
        return reference_splits(query)
    if same_bits.wanted():
        rows = 1
    programs = kv_heads * cdiv(rows, tile(rows, head_dim, query.dtype.itemsize).rows)
    wanted = cdiv(_PROGRAMS_PER_PROCESSOR * _processors(query.device), programs)
    return min(MOST_SPLITS, next_power_of_2(wanted))


def _computes(query: torch.Tensor) -> bool:
    """Whether there are kernels for these queries."""
    return query.dtype.itemsize < 4 or query.shape[2] <= _WIDEST


@cached
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        # The interpreter runs programs one by one; this many are enough to test splits.
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


class Piece(NamedTuple):
    """Some of the keys that queries attend to.

    query: [kv_heads, rows, head_dim]
    key, value: blocks of keys [blocks, kv_heads, tokens, head_dim]
    tile: how they are divided
    end: number of keys of each block; if they end with the queries' own, of those before these
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    tile: Tile
    end: int | torch.Tensor


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
    keys = key.shape[2]
    t = tile(query.shape[1], query.shape[2], query.dtype.itemsize)
    # Blocks that are no whole tiles are counted themselves.
    whole = keys % t.keys == 0
    number = running.keys // t.keys if whole else running.keys // keys * cdiv(keys, t.keys)
    _attend(running, Piece(query, key, value, t, keys), scores=scores, number=number)


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
    if not _computes(query):
        return reference_tail(running, query, key, value, tokens, end, visible, scores)
    if keys := key.shape[1]:
        # A tile of more queries would spill in some variants.
        t = tile(min(query.shape[1], 64), query.shape[2], query.dtype.itemsize)
        piece = Piece(query, key[None], value[None], t, keys - tokens if end is None else end)
        options = {"tokens": tokens, "visible": visible, "number": running.keys // t.keys}
        _attend(running, piece, scores=scores, **options)
    elif running.fresh:
        return Partial(torch.zeros_like(query), torch.full_like(running.peak[0], float("-inf")))
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
    tree_in_window = visible is not None and window is not None and not same_bits.wanted()
    if tree_in_window or not _computes(query):
        return reference_cache(query, key, value, tokens, end, window, first, visible)
    rows, head_dim = query.shape[1:]
    # A tile of more rows of a tree would spill.
    t = tile(rows if visible is None else min(rows, 64), head_dim, query.dtype.itemsize)
    if key.dtype.itemsize < query.dtype.itemsize == 4:
        # float32 converted from integers is in registers twice.
        t = t._replace(stages=1, keys=t.keys if visible is None else 16)
    piece = Piece(query, key[None], value[None], t, end)
    options = {"tokens": tokens, "visible": visible, "window": window or _ALL_KEYS}
    options |= {"number": first // t.keys, "shift": first % t.keys, "continues": False}
    if same_bits.wanted() and rows > WHOLE_ROWS:
        result = _result(query)
        state = result.lse, result.lse, result.lse, *result
        _launch(state, piece, splits(query), whole=True, **options)
        return result
    running = Running.of(query)
    _attend(running, piece, **options)
    return _merged(running, query)


def _attend(running: Running, piece: Piece, **options: Any) -> None:
    """Add keys to a state. options: those of `_launch`"""
    state = running.acc, running.peak, running.total, running.acc, running.peak
    _launch(state, piece, len(running.acc), fresh=running.fresh, **options)
    running.fresh = False


def _launch(
    state: tuple[torch.Tensor, ...],
    piece: Piece,
    parts: int,
    *,
    scores: ScoreBuffer | None = None,
    tokens: int = 0,
    visible: torch.Tensor | None = None,
    window: int = _ALL_KEYS,
    number: int = 0,
    shift: int = 0,
    fresh: bool = True,
    continues: bool = True,
    whole: bool = False,
) -> None:
    """Launch the programs for some keys.

    state: the first five tensors that the kernel writes
    parts: number of splits
    tokens: number of the queries' own keys; 0 if all queries see all keys
    number: number of the first tile; for `shift` and the others see `attend_kernel`
    """
    query, key, value, t, end = piece
    kv_heads, rows, head_dim = query.shape
    chunk_scores, size = state[1], 0
    if scores is not None:
        chunk_scores, size = scores.out, scores.size
    drafted, tiles = tokens, cdiv(rows, t.rows)
    if visible is not None:
        drafted = visible.shape[1]
    # Rows of a tree then take the keys of their path in the order of a chain.
    paths = visible is not None and same_bits.wanted()
    if paths:
        tiles = tokens * cdiv(rows // tokens, t.rows)
    attend_kernel[(kv_heads, 1 if whole else parts, tiles)](
        query, key, value, *state, chunk_scores,
        query if visible is None else visible.view(torch.uint8), end,
        *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *chunk_scores.stride()[:2],
        rows, len(key), tokens, drafted, window, parts, number, shift,
        scores.first if scores else 0, int(fresh), head_dim**-0.5,
        KEYS=t.keys, SIZE=size, MASKED=tokens > 0,
        TREE=visible is not None and not paths, PATHS=next_power_of_2(drafted) if paths else 0,
        ON_DEVICE=isinstance(end, torch.Tensor), CONTINUES=continues, WHOLE=whole,
        num_warps=t.warps, num_stages=t.stages, **_sizes(t.rows, head_dim),
    )  # fmt: skip


def _merged(running: Running, query: torch.Tensor) -> Partial:
    """Return the whole attention that a state holds."""
    kv_heads, rows, head_dim = query.shape
    result = _result(query)
    merge_kernel[(kv_heads, cdiv(rows, _MERGED_ROWS))](
        running.acc, running.peak, running.total, *result, rows, len(running.acc), num_warps=4,
        **_sizes(_MERGED_ROWS, head_dim),
    )  # fmt: skip
    return result


def _result(query: torch.Tensor) -> Partial:
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    return Partial(torch.empty(query.shape, dtype=query.dtype, device=query.device), lse)


def _sizes(rows: int, head_dim: int) -> dict[str, int | bool]:
    return {
        "DIM": head_dim,
        "WIDTH": next_power_of_2(head_dim),
        "ROWS": rows,
        # Variants that contract products and sums would round differently.
        "enable_fp_fusion": False,
    }
