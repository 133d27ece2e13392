"""The attention of a tile of queries to tiles of keys, and the merging of splits.

A text's keys are in tiles, counted from its first key, and the tiles belong to splits by turns. So
the order of a query's sums follows from the places of the keys alone: not from the blocks that hold
them, nor from the other queries, if tiles and splits have one size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(base, stride, row, dim, here):
    """Load [rows, dim] of a matrix whose rows are `stride` apart; 0 where `here` is false."""
    return tl.load(base + row[:, None] * stride + dim[None, :], mask=here, other=0.0)


@triton.jit
def _exp_from(scores, peak):
    """Return exp(scores - peak), where a peak of -inf means that there are no scores."""
    return tl.exp(scores - tl.where(peak == float("-inf"), 0.0, peak))


@triton.jit
def _step(
    query, key, value, seen, scale, acc, peak, total, scores_at, kept,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to a state.

    query: [rows, dim]; key, value: [keys, dim]; seen: [rows or 1, keys], which pairs count
    scores_at, kept: pointers [rows, chunks] and which of them to store to, if SIZE is not 0
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    if SIZE > 0:
        # Scores of chunks change nothing of what follows: a row has the same bits without them.
        parts = tl.reshape(scores, [scores.shape[0], scores.shape[1] // SIZE, SIZE])
        tops = tl.max(parts, 2)
        sums = tl.sum(_exp_from(parts, tops[:, :, None]), 2)
        tl.store(scores_at, tl.where(tops == float("-inf"), tops, tops + tl.log(sums)), kept)
    highest = tl.maximum(peak, tl.max(scores, 1))
    weights = _exp_from(scores, highest[:, None])
    fade = _exp_from(peak, highest)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, highest, total


@triton.jit
def _joined(acc, peak, total, other_acc, other_peak, other_total):
    """Return two states as one."""
    highest = tl.maximum(peak, other_peak)
    fade, weight = _exp_from(peak, highest), _exp_from(other_peak, highest)
    acc = acc * fade[:, None] + other_acc * weight[:, None]
    return acc, highest, total * fade + other_total * weight


@triton.jit
def _finished(out, lse, acc, peak, total, place, dim, real, here, DIM: tl.constexpr):
    """Store the attention of a state, of which `place` are the rows."""
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    item = out.dtype.element_ty
    tl.store(out + place[:, None] * DIM + dim[None, :], acc.to(item), mask=here)
    tl.store(lse + place, tl.where(nothing, float("-inf"), peak + tl.log(total)), mask=real)


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


@triton.jit
def _on_path(passed, index):
    """Return the columns of the keys that are number `index` on a path, [keys].

    passed: how many keys of the path the columns up to each one hold, [columns]
    """
    return tl.sum((passed[None, :] <= index[:, None]).to(tl.int32), 1)


@triton.jit
def _attended(
    q, acc, peak, total, key, value, visible, scores_of_rows, token, last, passed, dim, real, wide,
    begin, end, step, of_block, keys, scored, drafted, before, window, shift, first, scale,
    k_block, k_key, v_block, v_key,
    KEYS: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr,
    TREE: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    """Return a state with the tiles begin, begin + step, ... before `end` added.

    key, value: those of one head
    scores_of_rows: pointers to each row's scores, [rows, 1]
    last: the last key that each row sees, if MASKED and not TREE
    passed: see `_on_path`, if PATHS
    of_block: number of tiles of a block
    scored: number of keys whose chunks are scored, of each block
    before: number of keys before the drafted ones, if TREE or PATHS
    The others are those of `attend_kernel`.
    """
    for number in range(begin, end, step):
        within, block = number % of_block, (number // of_block).to(tl.int64)
        place = within * KEYS - shift + tl.arange(0, KEYS)
        inside = (place >= 0) & (place < keys)
        column = place
        if PATHS:
            column = tl.where(place < before, place, before + _on_path(passed, place - before))
        there = inside[:, None] & wide[None, :]
        # Integers of 8 bits are exact in every dtype of queries.
        k = _tile(key + block * k_block, k_key, column, dim, there).to(q.dtype)
        v = _tile(value + block * v_block, v_key, column, dim, there).to(q.dtype)
        seen = inside[None, :]
        if MASKED:
            if TREE:
                seen &= _in_tree(visible, token, place - before, drafted, real)
            else:
                seen &= place[None, :] <= last[:, None]
                seen &= place[None, :] > last[:, None] - window
        scores_at, kept = scores_of_rows, real[:, None]
        if SIZE > 0:
            part = within * (KEYS // SIZE) + tl.arange(0, KEYS // SIZE)
            chunk = first + block * ((scored + SIZE - 1) // SIZE) + part
            scores_at = scores_of_rows + chunk[None, :]
            kept = real[:, None] & (part * SIZE < scored)[None, :]
        acc, peak, total = _step(q, k, v, seen, scale, acc, peak, total, scores_at, kept, SIZE)
    return acc, peak, total


@triton.jit(
    do_not_specialize=[
        "end", "rows", "blocks", "tokens", "drafted", "window", "parts", "tile", "shift", "first",
        "fresh", "s_head", "s_row",
    ]
)  # fmt: skip
def attend_kernel(
    query, key, value, acc, peak, total, out, lse, chunk_scores, visible, end,
    q_head, q_row, k_block, k_head, k_key, v_block, v_head, v_key, s_head, s_row,
    rows, blocks, tokens, drafted, window, parts, tile, shift, first, fresh, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr,
    PATHS: tl.constexpr, ON_DEVICE: tl.constexpr, CONTINUES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend to those tiles of some keys that belong to a split: tile number n of a text belongs to
    split n % parts.

    end: number of keys of each block, of which all queries see all; if MASKED, of the keys before
        the queries' own `tokens` ones, which end the only block
    drafted: number of keys at the end in `visible`, if TREE or PATHS
    window: number of keys that a query sees, its own included, if MASKED and not TREE
    tile, shift: number of the first tile, and how many keys of it precede the first key
    first: index of the first chunk in `chunk_scores`
    CONTINUES, fresh: whether there may be a state already, and whether there is none
    TREE: whether the rows are a tree, and see what `visible` says
    PATHS: 0, or at least `drafted`: the rows are a tree too, and a program has those of one token,
        to which the keys of its path are as those of a chain
    WHOLE: whether each program has all splits, one after the other, and no state
    """
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if PATHS:
        # The heads of one token.
        own_token = tl.program_id(2) % tokens
        row = (tl.program_id(2) // tokens * ROWS + tl.arange(0, ROWS)) * tokens + own_token
    dim = tl.arange(0, WIDTH)
    real, wide = row < rows, dim < DIM
    here = real[:, None] & wide[None, :]
    q = _tile(query + head * q_head, q_row, row, dim, here)
    key += head * k_head
    value += head * v_head
    scores_of_rows = chunk_scores + head * s_head + row[:, None].to(tl.int64) * s_row
    keys = tl.load(end).to(tl.int32) if ON_DEVICE else end
    token, last, from_tile = row % tokens if MASKED else row, row, 0
    passed, before, scored = row, keys, keys
    if MASKED:
        last, before = keys + token, keys + tokens - drafted
        keys += tokens
        scored = keys
        if PATHS:
            own = tl.arange(0, PATHS)
            place = visible + own_token * drafted + own
            marks = tl.load(place, mask=own < drafted, other=0).to(tl.int32)
            passed = tl.cumsum(marks, 0)
            keys = before + tl.sum(marks, 0)
            last = row * 0 + keys - 1
        if not TREE:
            # Tiles that no row of the program sees change nothing.
            seen_first = tl.min(tl.where(real, last, keys), 0) + 1 - window
            from_tile = (tl.maximum(seen_first, 0) + shift) // KEYS
        # Every chunk gets a score.
        limit = scored if TREE or SIZE > 0 else tl.max(tl.where(real, last, 0), 0) + 1
        to_tile = (limit + shift + KEYS - 1) // KEYS
        # There is one block.
        of_block = to_tile
    else:
        of_block = (keys + KEYS - 1) // KEYS
        to_tile = blocks * of_block
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    a = tl.zeros([ROWS, WIDTH], tl.float32)
    begins = tile + from_tile
    if WHOLE:
        for each in range(parts):
            own_a, own_m, own_s = _attended(
                q, tl.zeros([ROWS, WIDTH], tl.float32),
                tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
                key, value, visible, scores_of_rows, token, last, passed, dim, real, wide,
                from_tile + (each + parts - begins % parts) % parts, to_tile, parts, of_block,
                keys, scored, drafted, before, window, shift, first, scale, k_block, k_key,
                v_block, v_key, KEYS, SIZE, MASKED, TREE, PATHS,
            )  # fmt: skip
            a, m, s = _joined(a, m, s, own_a, own_m, own_s)
        _finished(out, lse, a, m, s, head * rows + row, dim, real, here, DIM)
    else:
        state = (split.to(tl.int64) * kv_heads + head) * rows + row
        spread = state[:, None] * DIM + dim[None, :]
        if CONTINUES:
            known = fresh == 0
            m = tl.load(peak + state, mask=real & known, other=float("-inf"))
            s = tl.load(total + state, mask=real & known, other=0.0)
            a = tl.load(acc + spread, mask=here & known, other=0.0)
        a, m, s = _attended(
            q, a, m, s,
            key, value, visible, scores_of_rows, token, last, passed, dim, real, wide,
            from_tile + (split + parts - begins % parts) % parts, to_tile, parts, of_block,
            keys, scored, drafted, before, window, shift, first, scale, k_block, k_key, v_block,
            v_key, KEYS, SIZE, MASKED, TREE, PATHS,
        )  # fmt: skip
        tl.store(peak + state, m, mask=real)
        tl.store(total + state, s, mask=real)
        tl.store(acc + spread, a, mask=here)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_kernel(
    acc, peak, total, out, lse, rows, parts,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the attention of a state, whose splits are joined in their order."""
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
        other_m = tl.load(peak + state, mask=real, other=float("-inf"))
        other_s = tl.load(total + state, mask=real, other=0.0)
        other_a = tl.load(acc + state[:, None] * DIM + dim[None, :], mask=here, other=0.0)
        a, m, s = _joined(a, m, s, other_a, other_m, other_s)
    _finished(out, lse, a, m, s, head * rows + row, dim, real, here, DIM)
