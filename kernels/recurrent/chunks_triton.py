"""`delta.delta_chunks` on a GPU, in two launches for any number of chunks.

Of a chunk, the system of its updates and what its rows read of one another do not depend on the
state, so one launch computes them for all chunks at once. The other goes through the chunks one
after the other, with one program for each value head and some of its columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.recurrent.delta import EPS, DeltaRows, reference_chunks
from triforce_kernels.recurrent.heads_triton import heads_of, product, scale_of

# Columns that a program computes, and numbers of a key that it reads at once.
_COLUMNS, _NUMBERS = 32, 32
_CHUNKS = (16, 32, 64)


@triton.jit
def _systems_kernel(
    queries, keys, decays, rates, systems, looks, scale,
    q_row, q_head, k_row, k_head, d_row, r_row, group,
    KEY: tl.constexpr, CHUNK: tl.constexpr, NUMBERS: tl.constexpr, CORRECTS: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """For each chunk and value head, the matrix that makes updates of what the rows find missing in
    the state, and how much of each update a row reads, [CHUNK, CHUNK].
    """
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    queries += head // group * q_head
    keys += head // group * k_head
    inside = tl.arange(0, CHUNK)
    row = chunk * CHUNK + inside
    real = inside >= 0
    by_key = scale_of(keys, k_row, row, real, KEY, NUMBERS, CORRECTS, EPSILON)
    by_query = scale_of(queries, q_row, row, real, KEY, NUMBERS, CORRECTS, EPSILON) * scale
    rate = tl.load(rates + row * r_row + head)
    left = tl.cumsum(tl.load(decays + row * d_row + head), 0)
    system = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    looked = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for start in range(0, KEY, NUMBERS):
        number = start + tl.arange(0, NUMBERS)
        across = tl.trans(heads_of(keys, k_row, row, real, number, by_key, KEY))
        system += product(heads_of(keys, k_row, row, real, number, by_key, KEY), across)
        looked += product(heads_of(queries, q_row, row, real, number, by_query, KEY), across)
    follows = inside[:, None] >= inside[None, :]
    weight = tl.where(follows, tl.exp(left[:, None] - left[None, :]), 0.0)
    own = inside[:, None] == inside[None, :]
    system = tl.where(follows & (own == 0), system * weight * rate[:, None], 0.0)
    solved = tl.where(own, rate[:, None], 0.0)
    if CORRECTS:
        # Forward substitution: a row's update depends on those of rows before it.
        for index in range(1, CHUNK):
            line = tl.sum(tl.where(inside[:, None] == index, system, 0.0), 0)
            change = tl.sum(line[:, None] * solved, 0)
            solved = tl.where(inside[:, None] == index, solved - change[None, :], solved)
    place = (head * tl.num_programs(0) + chunk) * CHUNK + inside
    place = place[:, None] * CHUNK + inside[None, :]
    tl.store(systems + place, solved)
    tl.store(looks + place, looked * weight)


@triton.jit(do_not_specialize=["chunks"])
def _chunks_kernel(
    queries, keys, values, decays, systems, looks, state, out, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, d_row, chunks, heads, group,
    KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr, CORRECTS: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    queries += head // group * q_head
    keys += head // group * k_head
    inside = tl.arange(0, CHUNK)
    real = inside >= 0
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    real_column = (column < VALUE)[None, :]
    state += head * (KEY * VALUE) + column[None, :]
    square = inside[:, None] * CHUNK + inside[None, :]
    for chunk in range(chunks):
        row = chunk * CHUNK + inside
        by_key = scale_of(keys, k_row, row, real, KEY, NUMBERS, CORRECTS, EPSILON)
        by_query = scale_of(queries, q_row, row, real, KEY, NUMBERS, CORRECTS, EPSILON) * scale
        decay = tl.load(decays + row * d_row + head)
        left, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        grown = tl.exp(left)[:, None]
        read = tl.zeros([CHUNK, COLUMNS], dtype=tl.float32)
        result = tl.zeros([CHUNK, COLUMNS], dtype=tl.float32)
        for start in range(0, KEY, NUMBERS):
            number = start + tl.arange(0, NUMBERS)
            here = (number < KEY)[:, None] & real_column
            states = tl.load(state + number[:, None] * VALUE, mask=here, other=0.0)
            read += product(heads_of(keys, k_row, row, real, number, by_key, KEY), states)
            result += product(heads_of(queries, q_row, row, real, number, by_query, KEY), states)
        place = values + head * v_head + row[:, None] * v_row + column[None, :]
        value = tl.load(place, mask=real_column, other=0.0).to(tl.float32)
        square_of = (head * chunks + chunk) * (CHUNK * CHUNK) + square
        if CORRECTS:
            value -= grown * read
        update = product(tl.load(systems + square_of), value)
        result = result * grown + product(tl.load(looks + square_of), update)
        place = out + (row[:, None] * heads + head) * VALUE + column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=real_column)
        update *= tl.exp(whole - left)[:, None]
        # Every thread has read the state.
        tl.debug_barrier()
        for start in range(0, KEY, NUMBERS):
            number = start + tl.arange(0, NUMBERS)
            here = (number < KEY)[:, None] & real_column
            states = tl.load(state + number[:, None] * VALUE, mask=here, other=0.0)
            key = heads_of(keys, k_row, row, real, number, by_key, KEY)
            states = states * tl.exp(whole) + product(tl.trans(key), update)
            tl.store(state + number[:, None] * VALUE, states, mask=here)
        tl.debug_barrier()


def chunks(rows: DeltaRows, state: torch.Tensor, chunk: int) -> torch.Tensor:
    """`delta.delta_chunks`."""
    if chunk not in _CHUNKS:
        return reference_chunks(rows, state, chunk)
    count, heads, value_dim = rows.values.shape
    key_dim, group = rows.keys.shape[2], heads // rows.keys.shape[1]
    size = (heads, count // chunk, chunk, chunk)
    systems = torch.empty(size, dtype=torch.float32, device=state.device)
    looks = torch.empty_like(systems)
    out = torch.empty_like(rows.values, memory_format=torch.contiguous_format)
    of_rows = *rows.queries.stride()[:2], *rows.keys.stride()[:2]
    scale = key_dim**-0.5 if rows.corrects else 1.0
    named = {"KEY": key_dim, "CHUNK": chunk, "NUMBERS": _NUMBERS, "CORRECTS": rows.corrects}
    named |= {"EPSILON": EPS, "num_warps": 4}
    _systems_kernel[(count // chunk, heads)](
        rows.queries, rows.keys, rows.decays, rows.rates, systems, looks, scale, *of_rows,
        rows.decays.stride(0), rows.rates.stride(0), group, **named,
    )  # fmt: skip
    columns = min(_COLUMNS, max(16, next_power_of_2(value_dim)))
    _chunks_kernel[(cdiv(value_dim, columns), heads)](
        rows.queries, rows.keys, rows.values, rows.decays, systems, looks, state, out,
        scale, *of_rows, *rows.values.stride()[:2], rows.decays.stride(0), count // chunk,
        heads, group, VALUE=value_dim, COLUMNS=columns, **named,
    )  # fmt: skip
    return out
