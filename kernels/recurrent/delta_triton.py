"""`delta` on a GPU: one program for each value head, some of its columns, and a tile of rows.

Tiles of rows follow one another, and a tile finds the rows of those before it among the rows that
are left behind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.recurrent.delta import EPS, DeltaRows, LeftRows
from triforce_kernels.recurrent.heads_triton import heads_of, product, scale_of

# Rows and columns that a program computes; numbers of a key, and earlier rows, that it reads at
# once.
_ROWS, _COLUMNS, _NUMBERS, _EARLIER = 16, 32, 32, 32


@triton.jit(do_not_specialize=["rows", "first", "before"])
def _rule_kernel(
    queries, keys, values, decays, rates, sums, state, left_keys, left_updates, left_decays,
    first, visible, out, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, d_row, r_row, s_row, lk_head, lu_head, ld_head,
    rows, before, heads, group, KEY: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUMBERS: tl.constexpr, EARLIER: tl.constexpr,
    ON_DEVICE: tl.constexpr, TREE: tl.constexpr, CORRECTS: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // group
    queries += key_head * q_head
    keys += key_head * k_head
    left_keys += key_head * lk_head
    left_updates += head * lu_head
    left_decays += head * ld_head
    inside = tl.arange(0, ROWS)
    row, column = before + inside, part * COLUMNS + tl.arange(0, COLUMNS)
    real, real_column = row < rows, column < VALUE
    here = real[:, None] & real_column[None, :]
    begin = tl.load(first) if ON_DEVICE else first
    by_key = scale_of(keys, k_row, row, real, KEY, NUMBERS, CORRECTS, EPSILON)
    by_query = scale_of(queries, q_row, row, real, KEY, NUMBERS, CORRECTS, EPSILON) * scale
    decay = tl.load(decays + row * d_row + head, mask=real, other=0.0)
    rate = tl.load(rates + row * r_row + head, mask=real, other=0.0)
    # Logarithms of what is left, at each row, of what was there before all rows.
    own = tl.load(sums + row * s_row + head, mask=real, other=0.0)
    total = 0.0
    for start in range(0, begin, EARLIER):
        place = start + tl.arange(0, EARLIER)
        total += tl.sum(tl.load(left_decays + place, mask=place < begin, other=0.0), 0)
    target = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    result = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    system = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    looks = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    for start in range(0, KEY, NUMBERS):
        number = start + tl.arange(0, NUMBERS)
        key = heads_of(keys, k_row, row, real, number, by_key, KEY)
        query = heads_of(queries, q_row, row, real, number, by_query, KEY)
        states = tl.load(
            state + head * (KEY * VALUE) + number[:, None] * VALUE + column[None, :],
            mask=(number < KEY)[:, None] & real_column[None, :], other=0.0,
        )  # fmt: skip
        target += product(key, states)
        result += product(query, states)
        system += product(key, tl.trans(key))
        looks += product(query, tl.trans(key))
        if (part == 0) & (head % group == 0):
            tl.store(
                left_keys + (begin + row)[:, None] * KEY + number[None, :],
                key, mask=real[:, None] & (number < KEY)[None, :],
            )  # fmt: skip
    grown = tl.exp(own + total)[:, None]
    value = tl.load(
        values + head * v_head + row[:, None] * v_row + column[None, :], mask=here, other=0.0
    )
    found, target = grown * target, value.to(tl.float32)
    if CORRECTS:
        target -= found
    result *= grown
    done = 0.0
    for start in range(0, begin + before, EARLIER):
        place = start + tl.arange(0, EARLIER)
        # Rows before all rows, and rows of the tiles before this one.
        old, earlier = place < begin, place - begin
        known = place < begin + before
        each = tl.load(left_decays + place, mask=old, other=0.0)
        sum_of = tl.load(sums + earlier * s_row + head, mask=known & (earlier >= 0), other=0.0)
        since = tl.where(old, total - (done + tl.cumsum(each, 0)), -sum_of)
        done += tl.sum(each, 0)
        seen = known[None, :] & real[:, None]
        if TREE:
            pair = seen & (earlier >= 0)[None, :]
            follows = tl.load(visible + row[:, None] * rows + earlier[None, :], mask=pair, other=1)
            seen = seen & (follows != 0)
        weight = tl.where(seen, tl.exp(own[:, None] + since[None, :]), 0.0)
        keyed = tl.zeros([ROWS, EARLIER], dtype=tl.float32)
        looked = tl.zeros([ROWS, EARLIER], dtype=tl.float32)
        for numbers in range(0, KEY, NUMBERS):
            number = numbers + tl.arange(0, NUMBERS)
            across = tl.load(
                left_keys + place[None, :] * KEY + number[:, None],
                mask=(number < KEY)[:, None] & known[None, :], other=0.0,
            )  # fmt: skip
            keyed += product(heads_of(keys, k_row, row, real, number, by_key, KEY), across)
            looked += product(heads_of(queries, q_row, row, real, number, by_query, KEY), across)
        update = tl.load(
            left_updates + place[:, None] * VALUE + column[None, :],
            mask=known[:, None] & real_column[None, :], other=0.0,
        )  # fmt: skip
        if CORRECTS:
            target -= product(keyed * weight, update)
        result += product(looked * weight, update)
    if TREE:
        pair = real[:, None] & real[None, :]
        follows = tl.load(visible + row[:, None] * rows + row[None, :], mask=pair, other=0) != 0
    else:
        follows = inside[:, None] >= inside[None, :]
    weight = tl.where(follows, tl.exp(own[:, None] - own[None, :]), 0.0)
    strict = follows & (inside[:, None] != inside[None, :])
    system = tl.where(strict, system * weight * rate[:, None], 0.0)
    update = target * rate[:, None]
    # Forward substitution: a row's update depends on those of rows before it.
    if CORRECTS:
        for index in range(1, tl.minimum(ROWS, rows - before)):
            line = tl.sum(tl.where(inside[:, None] == index, system, 0.0), 0)
            change = tl.sum(line[:, None] * update, 0)
            update = tl.where(inside[:, None] == index, update - change[None, :], update)
    result += product(looks * weight, update)
    tl.store(out + (row[:, None] * heads + head) * VALUE + column[None, :], result, mask=here)
    tl.store(left_updates + (begin + row)[:, None] * VALUE + column[None, :], update, mask=here)
    if part == 0:
        tl.store(left_decays + begin + row, decay, mask=real)


def rule(
    rows: DeltaRows,
    state: torch.Tensor,
    left: LeftRows,
    first: int | torch.Tensor,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    count, heads, value_dim = rows.values.shape
    key_dim, sums = rows.keys.shape[2], rows.decays
    if visible is not None:
        sums = visible.float() @ rows.decays
    elif count > 1:
        sums = rows.decays.cumsum(0)
    out = torch.empty_like(rows.values, memory_format=torch.contiguous_format)
    columns = min(_COLUMNS, max(16, next_power_of_2(value_dim)))
    scale = key_dim**-0.5 if rows.corrects else 1.0
    for before in range(0, count, _ROWS):
        _rule_kernel[(cdiv(value_dim, columns), heads)](
            *rows.tensors, sums, state, *left, first, visible, out, scale,
            *rows.queries.stride()[:2], *rows.keys.stride()[:2], *rows.values.stride()[:2],
            rows.decays.stride(0), rows.rates.stride(0), sums.stride(0),
            left.keys.stride(0), left.updates.stride(0), left.decays.stride(0),
            count, before, heads, heads // rows.keys.shape[1], KEY=key_dim, VALUE=value_dim,
            ROWS=_ROWS, COLUMNS=columns, NUMBERS=_NUMBERS, EARLIER=_EARLIER,
            ON_DEVICE=isinstance(first, torch.Tensor), TREE=visible is not None,
            CORRECTS=rows.corrects, EPSILON=EPS, num_warps=4,
        )  # fmt: skip
    return out
