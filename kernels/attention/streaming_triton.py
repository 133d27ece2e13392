"""`streaming` on a GPU: one program for each KV head, part of its keys and tile of its queries."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triforce_kernels.attention.attention import Partial
from triforce_kernels.attention.scoring import ScoreBuffer
from triforce_kernels.attention.streaming import Running, reference_cache
from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.limits import MOST_SPLITS

_PROGRAMS_PER_PROCESSOR = 2
# More keys than any cache has.
_ALL_KEYS = 1 << 30


class Tile(NamedTuple):
    """Queries and keys that a program processes at once, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile(rows: int, head_dim: int, itemsize: int) -> Tile:
    """Choose tiles so that keys and values of two tiles load at once within the 99 KiB of shared
    memory that a program has on an RTX 3090 or 4090, and nothing spills from registers.

    float32 is multiplied exactly, without tensor cores, from registers, so its tiles are small.
    """
    width = next_power_of_2(head_dim)
    if itemsize == 4:
        most, keys = (32, 32) if width <= 64 else (16, 16)
    else:
        most, keys = (128 if width <= 128 else 64), (64 if width <= 128 else 32)
    count = min(most, max(16, next_power_of_2(rows)))
    if width > 256:
        count, keys = min(count, 32), 16
    if count == 128:
        keys = 32
    return Tile(count, keys, 8 if count * width >= 64 * 128 else 4, 2)


def splits(query: torch.Tensor) -> int:
    """Return the number of parts into which keys are divided: enough to fill the device."""
    kv_heads, rows, head_dim = query.shape
    programs = kv_heads * cdiv(rows, tile(rows, head_dim, query.dtype.itemsize).rows)
    wanted = cdiv(_PROGRAMS_PER_PROCESSOR * _processors(query.device), programs)
    return min(MOST_SPLITS, next_power_of_2(wanted))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        # The interpreter runs programs one by one; this many are enough to test splits.
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _tile(base, stride, row, dim, here):
    """Load [rows, dim] of a matrix whose rows are `stride` apart; 0 where `here` is false."""
    return tl.load(base + row[:, None] * stride + dim[None, :], mask=here, other=0.0)


@triton.jit
def _chunked(scores, size: tl.constexpr):
    """Return [rows, keys] as [rows, chunks, size]."""
    return tl.reshape(scores, [scores.shape[0], scores.shape[1] // size, size])


@triton.jit
def _exp_from(scores, peak):
    """Return exp(scores - peak), where a peak of -inf means that there are no scores."""
    return tl.exp(scores - tl.where(peak == float("-inf"), 0.0, peak))


@triton.jit
def _step(
    query, key, value, seen, scale, acc, peak, total, scores_at, kept,
    SIZE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the running state.

    query: [rows, dim]; key, value: [keys, dim]; seen: [rows or 1, keys], which pairs count
    scores_at, kept: pointers [rows, chunks] and which of them to store to, if SIZE is not 0
    """
    raw = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(seen, raw, float("-inf"))
    if SIZE > 0 and MASS:
        parts = _chunked(scores, SIZE)
        tops = tl.max(parts, 2)
        powers = _exp_from(parts, tops[:, :, None])
        sums = tl.sum(powers, 2)
        tl.store(scores_at, tl.where(tops == float("-inf"), tops, tops + tl.log(sums)), mask=kept)
        highest = tl.maximum(peak, tl.max(tops, 1))
        # The exponentials relative to the chunks' own peaks are reused: one exponential for each
        # score.
        weights = tl.reshape(powers * _exp_from(tops, highest[:, None])[:, :, None], scores.shape)
    else:
        if SIZE > 0:
            tl.store(scores_at, tl.sum(_chunked(raw, SIZE), 2), mask=kept)
        highest = tl.maximum(peak, tl.max(scores, 1))
        weights = _exp_from(scores, highest[:, None])
    fade = _exp_from(peak, highest)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, highest, total


@triton.jit
def _in_tree(visible, token, drafted_key, drafted, real):
    """Return which keys each row of a tree sees, [rows, keys].

    visible: pointer to [tokens, drafted]
    drafted_key: column of each key in it; negative for a key that all rows see
    """
    there = (drafted_key >= 0) & (drafted_key < drafted)
    allowed = tl.load(
        visible + token[:, None] * drafted + drafted_key[None, :],
        mask=real[:, None] & there[None, :], other=0,
    )  # fmt: skip
    return (drafted_key < 0)[None, :] | (allowed != 0)


@triton.jit(
    do_not_specialize=["rows", "blocks", "keys", "tiles", "first", "fresh", "s_head", "s_row"]
)
def _blocks_kernel(
    query, key, value, acc, peak, total, chunk_scores,
    q_head, q_row, k_block, k_head, k_key, v_block, v_head, v_key, s_head, s_row,
    rows, blocks, keys, tiles, first, fresh, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Attend to blocks of keys that all queries see. tiles: tiles of a block for each split"""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    real, wide = row < rows, dim < DIM
    here = real[:, None] & wide[None, :]
    q = _tile(query + head * q_head, q_row, row, dim, here)
    state = (split * kv_heads + head) * rows + row
    spread = state[:, None] * DIM + dim[None, :]
    if fresh:
        m = tl.full([ROWS], float("-inf"), tl.float32)
        s = tl.zeros([ROWS], tl.float32)
        a = tl.zeros([ROWS, WIDTH], tl.float32)
    else:
        m = tl.load(peak + state, mask=real, other=float("-inf"))
        s = tl.load(total + state, mask=real, other=0.0)
        a = tl.load(acc + spread, mask=here, other=0.0)
    for step in range(blocks * tiles):
        block = (step // tiles).to(tl.int64)
        column = (split * tiles + step % tiles) * KEYS + tl.arange(0, KEYS)
        inside = column < keys
        there = inside[:, None] & wide[None, :]
        k = _tile(key + block * k_block + head * k_head, k_key, column, dim, there)
        v = _tile(value + block * v_block + head * v_head, v_key, column, dim, there)
        scores_at, kept = chunk_scores + row[:, None], here
        if SIZE > 0:
            part = (split * tiles + step % tiles) * (KEYS // SIZE) + tl.arange(0, KEYS // SIZE)
            place = first + block * ((keys + SIZE - 1) // SIZE) + part
            scores_at = (
                chunk_scores + head * s_head + row[:, None].to(tl.int64) * s_row + place[None, :]
            )
            kept = real[:, None] & (part * SIZE < keys)[None, :]
        a, m, s = _step(q, k, v, inside[None, :], scale, a, m, s, scores_at, kept, SIZE, MASS)
    tl.store(peak + state, m, mask=real)
    tl.store(total + state, s, mask=real)
    tl.store(acc + spread, a, mask=here)


@triton.jit(
    do_not_specialize=["rows", "parts", "keys", "tokens", "drafted", "first", "s_head", "s_row"]
)
def _tail_kernel(
    query, key, value, acc, peak, total, chunk_scores, visible, out, lse,
    q_head, q_row, k_head, k_key, v_head, v_key, s_head, s_row,
    rows, parts, keys, tokens, drafted, first, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, MASS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Merge all splits of the running state and the tail, which ends with the queries' own keys.

    drafted: number of keys at the end in `visible`, if TREE
    """
    head = tl.program_id(0).to(tl.int64)
    kv_heads = tl.num_programs(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    real, wide = row < rows, dim < DIM
    here = real[:, None] & wide[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    a = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in range(parts):
        state = (split * kv_heads + head) * rows + row
        other = tl.load(peak + state, mask=real, other=float("-inf"))
        highest = tl.maximum(m, other)
        fade, weight = _exp_from(m, highest), _exp_from(other, highest)
        s = s * fade + tl.load(total + state, mask=real, other=0.0) * weight
        there = tl.load(acc + state[:, None] * DIM + dim[None, :], mask=here, other=0.0)
        a = a * fade[:, None] + there * weight[:, None]
        m = highest
    q = _tile(query + head * q_head, q_row, row, dim, here)
    token = row % tokens
    for start in range(0, keys, KEYS):
        column = start + tl.arange(0, KEYS)
        inside = column < keys
        there = inside[:, None] & wide[None, :]
        k = _tile(key + head * k_head, k_key, column, dim, there)
        v = _tile(value + head * v_head, v_key, column, dim, there)
        if TREE:
            seen = inside[None, :] & _in_tree(
                visible, token, column - (keys - drafted), drafted, real
            )
        else:
            seen = inside[None, :] & ((column - (keys - tokens))[None, :] <= token[:, None])
        scores_at, kept = chunk_scores + row[:, None], here
        if SIZE > 0:
            part = start // SIZE + tl.arange(0, KEYS // SIZE)
            scores_at = (
                chunk_scores
                + head * s_head
                + row[:, None].to(tl.int64) * s_row
                + (first + part)[None, :]
            )
            kept = real[:, None] & (part * SIZE < keys)[None, :]
        a, m, s = _step(q, k, v, seen, scale, a, m, s, scores_at, kept, SIZE, MASS)
    nothing = s == 0.0
    a = a / tl.where(nothing, 1.0, s)[:, None]
    tl.store(
        out + (head * rows + row)[:, None] * DIM + dim[None, :],
        a.to(out.dtype.element_ty), mask=here,
    )  # fmt: skip
    tl.store(lse + head * rows + row, tl.where(nothing, float("-inf"), m + tl.log(s)), mask=real)


@triton.jit(do_not_specialize=["rows", "tokens", "drafted", "window"])
def _cache_kernel(
    query, key, value, acc, peak, total, visible, end,
    q_head, q_row, k_head, k_key, v_head, v_key,
    rows, tokens, drafted, window, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    """Attend to a part of the keys up to `end` and of the queries' own keys after it.

    drafted: number of keys at the end in `visible`, if TREE
    window: number of keys that a query sees, its own included; all of them if TREE
    """
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads, parts = tl.num_programs(0), tl.num_programs(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    real, wide = row < rows, dim < DIM
    here = real[:, None] & wide[None, :]
    q = _tile(query + head * q_head, q_row, row, dim, here)
    before = tl.load(end).to(tl.int32)
    keys = before + tokens
    last = before + row % tokens
    # No query sees the tiles before the window of the first one. Each part has the same number of
    # whole tiles, whatever the end is.
    hidden = tl.maximum(before + 1 - window, 0) // KEYS
    tiles = ((keys + KEYS - 1) // KEYS - hidden + parts - 1) // parts
    first = (hidden + split * tiles) * KEYS
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    a = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, tl.minimum(first + tiles * KEYS, keys), KEYS):
        column = start + tl.arange(0, KEYS)
        there = (column < keys)[:, None] & wide[None, :]
        # Integers of 8 bits are exact in every dtype of queries.
        k = _tile(key + head * k_head, k_key, column, dim, there).to(q.dtype)
        v = _tile(value + head * v_head, v_key, column, dim, there).to(q.dtype)
        if TREE:
            of_tree = column - (keys - drafted)
            seen = (column < keys)[None, :] & _in_tree(
                visible, row % tokens, of_tree, drafted, real
            )
        else:
            seen = (column[None, :] <= last[:, None]) & (column[None, :] > last[:, None] - window)
        a, m, s = _step(q, k, v, seen, scale, a, m, s, peak, real, 0, False)
    state = (split * kv_heads + head) * rows + row
    tl.store(peak + state, m, mask=real)
    tl.store(total + state, s, mask=real)
    tl.store(acc + state[:, None] * DIM + dim[None, :], a, mask=here)


def blocks(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: ScoreBuffer | None,
) -> None:
    kv_heads, rows, head_dim = query.shape
    count, _, keys, _ = key.shape
    parts = running.acc.shape[0]
    t = tile(rows, head_dim, query.dtype.itemsize)
    chunk_scores, options = _buffer(scores, running.peak)
    _blocks_kernel[(kv_heads, parts, cdiv(rows, t.rows))](
        query, key, value, running.acc, running.peak, running.total, chunk_scores,
        *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *chunk_scores.stride()[:2],
        rows, count, keys, cdiv(cdiv(keys, t.keys), parts),
        scores.first if scores else 0, int(running.fresh), head_dim**-0.5,
        **_options(t, head_dim), **options,
    )  # fmt: skip


def tail(
    running: Running,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    visible: torch.Tensor | None,
    scores: ScoreBuffer | None,
) -> Partial:
    kv_heads, rows, head_dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    # A tile of more queries would spill in some variants of the tail kernel.
    t = tile(min(rows, 64), head_dim, query.dtype.itemsize)
    chunk_scores, options = _buffer(scores, running.peak)
    _tail_kernel[(kv_heads, cdiv(rows, t.rows))](
        query, key, value, running.acc, running.peak, running.total, chunk_scores,
        query if visible is None else visible.view(torch.uint8), out, lse,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *chunk_scores.stride()[:2],
        rows, 0 if running.fresh else running.acc.shape[0], key.shape[1], tokens,
        tokens if visible is None else visible.shape[1], scores.first if scores else 0,
        head_dim**-0.5,
        TREE=visible is not None, **_options(t, head_dim), **options,
    )  # fmt: skip
    return Partial(out, lse)


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
    if visible is not None and window is not None:
        return reference_cache(query, key, value, tokens, end, window, first, visible)
    kv_heads, rows, head_dim = query.shape
    if isinstance(end, int):
        end = torch.full((1,), end, dtype=torch.int64, device=query.device)
    running = Running.of(query)
    running.fresh = False
    # A tile of more rows of a tree would spill.
    t = tile(rows if visible is None else min(rows, 64), head_dim, query.dtype.itemsize)
    if key.dtype.itemsize < query.dtype.itemsize == 4:
        # float32 converted from integers is in registers twice.
        t = t._replace(stages=1, keys=t.keys if visible is None else 16)
    _cache_kernel[(kv_heads, running.acc.shape[0], cdiv(rows, t.rows))](
        query, key, value, running.acc, running.peak, running.total,
        query if visible is None else visible.view(torch.uint8), end,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        rows, tokens, tokens if visible is None else visible.shape[1], window or _ALL_KEYS,
        head_dim**-0.5, TREE=visible is not None, **_options(t, head_dim),
    )  # fmt: skip
    # No keys, but in the query's dtype, whatever the dtype of the cache is.
    return tail(running, query, query[:, :0], query[:, :0], tokens, None, None)


def _options(t: Tile, head_dim: int) -> dict[str, int]:
    return {
        "DIM": head_dim,
        "WIDTH": next_power_of_2(head_dim),
        "ROWS": t.rows,
        "KEYS": t.keys,
        "num_warps": t.warps,
        "num_stages": t.stages,
        # Otherwise some versions of Triton contract products and sums and others do not.
        "enable_fp_fusion": True,
    }


def _buffer(scores: ScoreBuffer | None, unused: torch.Tensor) -> tuple[torch.Tensor, dict]:
    if scores is None:
        return unused, {"SIZE": 0, "MASS": False}
    return scores.out, {"SIZE": scores.size, "MASS": scores.mass}
