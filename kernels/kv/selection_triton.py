"""`selection` on a GPU: one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import next_power_of_2
from triforce_kernels.order_triton import ordered

_MOST_AT_ONCE = 4096


@triton.jit
def _worth(scores, chunk, chunks, newest):
    """Return scores of chunks as integers of the same order; -2 ** 31 past the last chunk."""
    there = chunk < chunks
    score = tl.load(scores + chunk, mask=there, other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    score = tl.where((chunk == 0) | (chunk >= chunks - newest), float("inf"), score)
    return tl.where(there, ordered(score), -2147483648)


@triton.jit(do_not_specialize=["s_row", "chunks", "newest", "filled", "slots"])
def _choose_kernel(
    scores, chunk_of, moves, present, entering, s_row, chunks, newest, filled, slots,
    CHUNKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """present: [rows, chunks] int8 of zeros; entering: [rows, slots]; both are scratch memory."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * s_row
    present += row * chunks
    chunk_of += row * slots
    entering += row * slots
    moves += row * slots
    # The greatest number that at least `filled` chunks reach, bit by bit from the top.
    least = tl.full([], -2147483648, tl.int32)
    bit = tl.full([], -2147483648, tl.int32)
    for _ in range(32):
        tried = least ^ bit
        count = 0
        for start in range(0, chunks, CHUNKS):
            worth = _worth(scores, start + tl.arange(0, CHUNKS), chunks, newest)
            count += tl.sum((worth >= tried).to(tl.int32))
        least = tl.where(count >= filled, tried, least)
        bit = (bit >> 1) & 0x7FFFFFFF
    above = 0
    for start in range(0, chunks, CHUNKS):
        worth = _worth(scores, start + tl.arange(0, CHUNKS), chunks, newest)
        above += tl.sum((worth > least).to(tl.int32))
    # Several chunks may have exactly this score: the earlier ones are selected, up to `edge`.
    edge, tied = -1, 0
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        equal = (_worth(scores, chunk, chunks, newest) == least).to(tl.int32)
        rank = tied + tl.cumsum(equal, 0)
        edge = tl.maximum(
            edge, tl.max(tl.where((equal == 1) & (above + rank <= filled), chunk, -1))
        )
        tied += tl.sum(equal)
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        held = tl.load(chunk_of + slot, mask=slot < slots, other=-1)
        tl.store(present + held, 1, mask=held >= 0)
    tl.debug_barrier()
    count = 0
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        worth = _worth(scores, chunk, chunks, newest)
        wanted = (worth > least) | ((worth == least) & (chunk <= edge))
        held = tl.load(present + chunk, mask=chunk < chunks, other=1)
        enters = (wanted & (held == 0)).to(tl.int32)
        place = count + tl.cumsum(enters, 0) - 1
        tl.store(entering + place, chunk.to(tl.int64), mask=enters == 1)
        count += tl.sum(enters)
    tl.debug_barrier()
    count = 0
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        held = tl.load(chunk_of + slot, mask=slot < slots, other=-1)
        chunk = tl.maximum(held, 0).to(tl.int32)
        worth = _worth(scores, chunk, chunks, newest)
        stays = (held >= 0) & ((worth > least) | ((worth == least) & (chunk <= edge)))
        free = ((slot < filled) & (stays == 0)).to(tl.int32)
        place = count + tl.cumsum(free, 0) - 1
        comes = tl.load(entering + place, mask=free == 1, other=-1)
        tl.store(moves + slot, comes, mask=slot < slots)
        tl.store(chunk_of + slot, comes, mask=free == 1)
        count += tl.sum(free)


def choose(scores: torch.Tensor, chunk_of: torch.Tensor, chunks: int, newest: int) -> torch.Tensor:
    slots = chunk_of.shape[-1]
    rows = scores.reshape(-1, scores.shape[-1])
    moves = torch.empty_like(chunk_of)
    present = torch.zeros((rows.shape[0], chunks), dtype=torch.int8, device=scores.device)
    at_once = min(_MOST_AT_ONCE, next_power_of_2(chunks))
    _choose_kernel[(rows.shape[0],)](
        rows, chunk_of, moves, present, torch.empty_like(chunk_of),
        rows.stride(0), chunks, newest, min(slots, chunks), slots,
        CHUNKS=at_once, SLOTS=min(1024, next_power_of_2(slots)),
        num_warps=8 if at_once > 1024 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return moves
