"""`scoring` on a GPU: one program for each KV head, group of queries, and run of chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv

_CHUNKS = 128


@triton.jit(do_not_specialize=["heads", "tokens", "keys", "chunks", "s_head", "s_row"])
def _group_kernel(
    scores, lse, out, s_head, s_row, o_group, o_head,
    heads, tokens, keys, chunks,
    SIZE: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    kv_head, group = tl.program_id(0).to(tl.int64), tl.program_id(2)
    groups = tl.num_programs(2)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    piece = chunk[:, None] * PIECES + tl.arange(0, PIECES)[None, :]
    there = piece * SIZE < keys
    # Tokens t with t * groups // tokens == group.
    begin = (group * tokens + groups - 1) // groups
    end = ((group + 1) * tokens + groups - 1) // groups
    total = tl.zeros([CHUNKS], tl.float32)
    for index in range(heads * (end - begin)):
        row = (index // (end - begin) * tokens + begin + index % (end - begin)).to(tl.int64)
        here = scores + kv_head * s_head + row * s_row + piece
        values = tl.load(here, mask=there, other=float("-inf"))
        whole = tl.load(lse + kv_head * heads * tokens + row)
        values = tl.exp(values - tl.where(whole == float("-inf"), 0.0, whole))
        total += tl.sum(values, 1)
    mean = total / (heads * (end - begin))
    place = out + group.to(tl.int64) * o_group + kv_head * o_head + chunk
    tl.store(place, mean.to(out.dtype.element_ty), mask=chunk < chunks)


def group_scores(
    scores: torch.Tensor,
    lse: torch.Tensor,
    keys: int,
    size: int,
    chunk: int,
    tokens: int,
    out: torch.Tensor,
) -> None:
    kv_heads, rows, _ = scores.shape
    groups, _, chunks = out.shape
    _group_kernel[(kv_heads, cdiv(chunks, _CHUNKS), groups)](
        scores, lse, out,
        *scores.stride()[:2], *out.stride()[:2],
        rows // tokens, tokens, keys, chunks,
        SIZE=size, PIECES=chunk // size, CHUNKS=_CHUNKS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
