"""Speculative sampling on a GPU: many programs sum parts of the vocabulary, then one program per
draft chooses.

Everything is summed in float64. A GeForce computes float64 at a 64th of its float32 rate, so no
program sums more than a part of the vocabulary: the whole one would take about half a millisecond.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv, next_power_of_2

_PART = 1024
_DRAFT_TOKENS = 64


@triton.jit
def _held(
    tokens, drafted, target, coins, q_row, p_row, n, TOKENS: tl.constexpr, SURE: tl.constexpr
):
    """Return how many tokens of a draft are accepted, each while coin * q[x] < p[x]."""
    index = tl.arange(0, TOKENS)
    inside = index < n
    x = tl.load(tokens + index, mask=inside, other=0)
    coin = tl.load(coins + index, mask=inside, other=0.0)
    there = index.to(tl.int64)
    p = tl.load(target + there * p_row + x, mask=inside, other=0.0).to(tl.float64)
    if not SURE:
        coin *= tl.load(drafted + there * q_row + x, mask=inside, other=0.0).to(tl.float64)
    return tl.min(tl.where(inside & ((coin < p) == 0), index, n))


@triton.jit
def _weights(tokens, drafted, target, column, vocab, held, n, q_row, p_row, SURE: tl.constexpr):
    """Return the weights of the next token for some columns: max(p - q, 0), and p itself.

    After a fully accepted draft there is no q.
    """
    there = column < vocab
    p = tl.load(target + held.to(tl.int64) * p_row + column, mask=there, other=0.0)
    last = tl.maximum(tl.minimum(held, n - 1), 0).to(tl.int64)
    if SURE:
        q = tl.where(column == tl.load(tokens + last), 1.0, 0.0)
    else:
        q = tl.load(drafted + last * q_row + column, mask=there, other=0.0)
    gap = p - tl.where(held < n, q, 0.0)
    return tl.where(gap < 0.0, 0.0, gap), p


@triton.jit(do_not_specialize=["n", "vocab", "t_draft", "q_draft", "p_draft", "c_draft"])
def _sums_kernel(
    tokens, drafted, target, coins, sums,
    t_draft, q_draft, q_row, p_draft, p_row, c_draft, n, vocab,
    TOKENS: tl.constexpr, PART: tl.constexpr, SURE: tl.constexpr,
):  # fmt: skip
    """sums: [drafts, 2, parts], the sums of max(p - q, 0) and of p."""
    draft, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    tokens += draft * t_draft
    drafted += draft * q_draft
    target += draft * p_draft
    coins += draft * c_draft
    held = _held(tokens, drafted, target, coins, q_row, p_row, n, TOKENS, SURE)
    column = part * PART + tl.arange(0, PART)
    gap, p = _weights(tokens, drafted, target, column, vocab, held, n, q_row, p_row, SURE)
    sums += draft * 2 * parts + part
    tl.store(sums, tl.sum(gap.to(tl.float64)))
    tl.store(sums + parts, tl.sum(p.to(tl.float64)))


@triton.jit(do_not_specialize=["n", "vocab", "parts", "t_draft", "q_draft", "p_draft", "c_draft"])
def _choose_kernel(
    tokens, drafted, target, coins, sums, accepted, chosen,
    t_draft, q_draft, q_row, p_draft, p_row, c_draft, n, vocab, parts,
    TOKENS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, SURE: tl.constexpr,
):  # fmt: skip
    draft = tl.program_id(0).to(tl.int64)
    tokens += draft * t_draft
    drafted += draft * q_draft
    target += draft * p_draft
    coins += draft * c_draft
    held = _held(tokens, drafted, target, coins, q_row, p_row, n, TOKENS, SURE)
    part = tl.arange(0, PARTS)
    sums += draft * 2 * parts
    gaps = tl.load(sums + part, mask=part < parts, other=0.0)
    # If rounding left no residual, p is used.
    residual = tl.sum(gaps) > 0.0
    weights = tl.where(residual, gaps, tl.load(sums + parts + part, mask=part < parts, other=0.0))
    total = tl.sum(weights)
    # A coin is at most 1 - 2 ** -53, so this is below the total.
    aim = tl.load(coins + n) * total
    reached = (tl.cumsum(weights, 0) > aim) & (weights > 0.0)
    first = tl.min(tl.where(reached, part, PARTS))
    # Sums in another order may end slightly lower.
    first = tl.where(first < PARTS, first, tl.max(tl.where(weights > 0.0, part, 0)))
    passed = tl.sum(tl.where(part < first, weights, 0.0))
    column = first * PART + tl.arange(0, PART)
    gap, p = _weights(tokens, drafted, target, column, vocab, held, n, q_row, p_row, SURE)
    weight = tl.where(residual, gap, p).to(tl.float64)
    # A token of probability 0 is never drawn, whatever the rounding of its sum.
    beyond = (passed + tl.cumsum(weight, 0) > aim) & (weight > 0.0)
    token = tl.min(tl.where(beyond, column, vocab))
    token = tl.where(token < vocab, token, tl.max(tl.where(weight > 0.0, column, -1)))
    token = tl.where(total == total, token, -1)
    tl.store(accepted + draft, held.to(tl.int64))
    tl.store(chosen + draft, token.to(tl.int64))


def accept(
    tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    drafts, n = tokens.shape
    vocab = target_probs.shape[-1]
    parts = cdiv(vocab, _PART)
    accepted, chosen = torch.empty((2, drafts), dtype=torch.int64, device=tokens.device)
    sums = torch.empty((drafts, 2, parts), dtype=torch.float64, device=tokens.device)
    # Without a draft, or its distributions, nothing is read from them: any address will do.
    distributions = target_probs if draft_probs is None or not n else draft_probs
    tokens = tokens.contiguous() if n else accepted
    coins = coins.contiguous()
    inputs = (tokens, distributions, target_probs, coins, sums)
    strides = (n, *distributions.stride()[:2], *target_probs.stride()[:2], n + 1)
    # One size for most drafts: a new size would be compiled in the middle of a request.
    options = {"TOKENS": max(_DRAFT_TOKENS, next_power_of_2(n)), "PART": _PART}
    options |= {"SURE": draft_probs is None, "num_warps": 4, "enable_fp_fusion": True}
    _sums_kernel[(drafts, parts)](*inputs, *strides, n, vocab, **options)
    _choose_kernel[(drafts,)](
        *inputs, accepted, chosen, *strides, n, vocab, parts,
        PARTS=next_power_of_2(parts), **options,
    )  # fmt: skip
    return accepted, chosen


def pick(probs: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    empty = torch.empty((probs.shape[0], 0), dtype=torch.int64, device=probs.device)
    return accept(empty, None, probs.unsqueeze(1), coins.unsqueeze(1))[1]
