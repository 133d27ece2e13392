"""`sampling` on a GPU: one program for a row, or for a draft."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .order_triton import ordered

_MOST_AT_ONCE = 4096
_DRAFT_TOKENS = 64


@triton.jit(do_not_specialize=["vocab"])
def _greedy_kernel(logits, out, l_row, vocab, AT_ONCE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * l_row
    out += row * vocab
    peak, bad = float("-inf"), 0
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        bad = tl.maximum(bad, tl.max((x != x).to(tl.int32)))
        peak = tl.maximum(peak, tl.max(tl.where(x == x, x, float("-inf"))))
    token = vocab
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        token = tl.minimum(token, tl.min(tl.where((x == peak) & (column < vocab), column, vocab)))
    one = tl.where(bad > 0, float("nan"), peak - peak + 1.0)
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        tl.store(out + column, tl.where(column == token, one, 0.0), mask=column < vocab)


@triton.jit(do_not_specialize=["vocab", "top_k", "temperature", "top_p"])
def _law_kernel(
    logits, out, l_row, temperature, top_k, top_p, vocab,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * l_row
    out += row * vocab
    least = tl.full([], -2147483648, tl.int32)
    if TOP_K:
        # The greatest number that at least k tokens reach, bit by bit from the top.
        bit = tl.full([], -2147483648, tl.int32)
        for _ in range(32):
            tried = least ^ bit
            count = 0
            for start in range(0, vocab, AT_ONCE):
                column = start + tl.arange(0, AT_ONCE)
                there = column < vocab
                x = tl.load(logits + column, mask=there, other=0.0).to(tl.float32) / temperature
                count += tl.sum(((ordered(x) >= tried) & there).to(tl.int32))
            least = tl.where(count >= top_k, tried, least)
            bit = (bit >> 1) & 0x7FFFFFFF
    peak, bad = float("-inf"), 0
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        bad = tl.maximum(bad, tl.max((x != x).to(tl.int32)))
        peak = tl.maximum(peak, tl.max(tl.where(x == x, x, float("-inf"))))
    peak = tl.where(bad > 0, float("nan"), peak) / temperature
    whole = 0.0
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        there = column < vocab
        x = tl.load(logits + column, mask=there, other=float("-inf")).to(tl.float32) / temperature
        power = tl.exp(x - peak)
        if TOP_K:
            power = tl.where(ordered(x) >= least, power, tl.where(power == power, 0.0, power))
        power = tl.where(there, power, 0.0)
        whole += tl.sum(power)
        tl.store(out + column, power, mask=there)
    tl.debug_barrier()
    edge, drop = tl.full([], 0, tl.int32), 0
    if TOP_P:
        # Ascending, tokens are dropped while their sum is at most 1 - p: the least number up to
        # which the sum is more, bit by bit from the top.
        most = (1.0 - top_p) * whole
        bit = tl.full([], 1 << 30, tl.int32)
        for _ in range(31):
            tried = edge + bit - 1
            mass = 0.0
            for start in range(0, vocab, AT_ONCE):
                column = start + tl.arange(0, AT_ONCE)
                power = tl.load(out + column, mask=column < vocab, other=0.0)
                mass += tl.sum(tl.where(power.to(tl.int32, bitcast=True) <= tried, power, 0.0))
            edge = tl.where(mass <= most, edge + bit, edge)
            bit = bit >> 1
        below, equal, highest = 0.0, 0, 0
        for start in range(0, vocab, AT_ONCE):
            column = start + tl.arange(0, AT_ONCE)
            power = tl.load(out + column, mask=column < vocab, other=0.0)
            bits = power.to(tl.int32, bitcast=True)
            below += tl.sum(tl.where(bits < edge, power, 0.0))
            equal += tl.sum(((bits == edge) & (column < vocab)).to(tl.int32))
            highest = tl.maximum(highest, tl.max(bits))
        # Of equals at the edge the earlier ones go, and never all.
        value = edge.to(tl.float32, bitcast=True)
        drop = tl.minimum(((most - below) / value).to(tl.int32), equal - 1)
        if edge > highest:  # rounding, or p = 0: the likeliest stays
            edge = highest
            equal = 0
            for start in range(0, vocab, AT_ONCE):
                column = start + tl.arange(0, AT_ONCE)
                power = tl.load(out + column, mask=column < vocab, other=0.0)
                same = (power.to(tl.int32, bitcast=True) == edge) & (column < vocab)
                equal += tl.sum(same.to(tl.int32))
            drop = equal - 1
        kept, seen = 0.0, 0
        for start in range(0, vocab, AT_ONCE):
            column = start + tl.arange(0, AT_ONCE)
            there = column < vocab
            power = tl.load(out + column, mask=there, other=0.0)
            bits = power.to(tl.int32, bitcast=True)
            same = ((bits == edge) & there).to(tl.int32)
            rank = seen + tl.cumsum(same, 0)
            seen += tl.sum(same)
            power = tl.where((bits > edge) | ((same == 1) & (rank > drop)), power, 0.0)
            kept += tl.sum(power)
            tl.store(out + column, power, mask=there)
        whole = tl.where(whole == whole, kept, whole)
        tl.debug_barrier()
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        power = tl.load(out + column, mask=column < vocab, other=0.0)
        tl.store(out + column, power / whole, mask=column < vocab)


@triton.jit(do_not_specialize=["n", "vocab", "t_draft", "q_draft", "p_draft", "c_draft"])
def _accept_kernel(
    tokens, drafted, target, coins, accepted, chosen,
    t_draft, q_draft, q_row, p_draft, p_row, c_draft, n, vocab,
    TOKENS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    draft = tl.program_id(0).to(tl.int64)
    q, p = drafted + draft * q_draft, target + draft * p_draft
    index = tl.arange(0, TOKENS)
    inside = index < n
    x = tl.load(tokens + draft * t_draft + index, mask=inside, other=0)
    coin = tl.load(coins + draft * c_draft + index, mask=inside, other=0.0)
    there = index.to(tl.int64)
    q_x = tl.load(q + there * q_row + x, mask=inside, other=0.0).to(tl.float64)
    p_x = tl.load(p + there * p_row + x, mask=inside, other=0.0).to(tl.float64)
    held = tl.min(tl.where(inside & ((coin * q_x < p_x) == 0), index, n))
    p += held.to(tl.int64) * p_row
    q += tl.maximum(tl.minimum(held, n - 1), 0).to(tl.int64) * q_row
    share = tl.where(held < n, 1.0, 0.0)  # behind a draft that holds wholly there is no q
    # Two sums: of max(p - q, 0), and of p, which serves where rounding left nothing of the former.
    rest, whole = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        law = tl.load(p + column, mask=column < vocab, other=0.0)
        gap = law - share * tl.load(q + column, mask=column < vocab, other=0.0)
        gap = tl.where(gap < 0.0, 0.0, gap)
        rest += tl.sum(gap.to(tl.float64))
        whole += tl.sum(law.to(tl.float64))
    residual = rest > 0.0
    total = tl.where(residual, rest, whole)
    share = tl.where(residual, share, 0.0)
    # A coin is at most 1 - 2 ** -53, so that this is below the total.
    aim = tl.load(coins + draft * c_draft + n) * total
    token, last, passed = vocab, -1, tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        law = tl.load(p + column, mask=column < vocab, other=0.0)
        gap = law - share * tl.load(q + column, mask=column < vocab, other=0.0)
        weight = tl.where(gap < 0.0, 0.0, gap).to(tl.float64)
        # A token of probability 0 is never drawn, however its sum is rounded.
        reached = (passed + tl.cumsum(weight, 0) > aim) & (weight > 0.0)
        token = tl.minimum(token, tl.min(tl.where(reached, column, vocab)))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, column, -1)))
        passed += tl.sum(weight)
    token = tl.where(token < vocab, token, last)  # sums in another order may end a hair lower
    token = tl.where(total == total, token, -1)
    tl.store(accepted + draft, held.to(tl.int64))
    tl.store(chosen + draft, token.to(tl.int64))


def law(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    at_once = min(_MOST_AT_ONCE, triton.next_power_of_2(vocab))
    options = {"AT_ONCE": at_once, "num_warps": 16 if at_once == _MOST_AT_ONCE else 4}
    options["enable_fp_fusion"] = True
    if temperature == 0:
        _greedy_kernel[(rows,)](logits, out, logits.stride(0), vocab, **options)
    else:
        _law_kernel[(rows,)](
            logits, out, logits.stride(0), temperature, top_k, top_p, vocab,
            TOP_K=0 < top_k < vocab, TOP_P=top_p < 1, **options,
        )  # fmt: skip
    return out


def accept(
    tokens: torch.Tensor,
    draft_laws: torch.Tensor | None,
    target_laws: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    if draft_laws is None:
        draft_laws = torch.nn.functional.one_hot(tokens, target_laws.shape[-1]).float()
    drafts, n = tokens.shape
    vocab = target_laws.shape[-1]
    accepted, chosen = torch.empty((2, drafts), dtype=torch.int64, device=tokens.device)
    at_once = min(_MOST_AT_ONCE, triton.next_power_of_2(vocab))
    laws = draft_laws if n else target_laws  # none is read, but an address it must be
    tokens = tokens.contiguous() if n else accepted
    coins = coins.contiguous()
    _accept_kernel[(drafts,)](
        tokens, laws, target_laws, coins, accepted, chosen,
        n, laws.stride(0), laws.stride(1), *target_laws.stride()[:2], n + 1, n, vocab,
        # One size for most drafts: a new one would be compiled in the middle of a text.
        TOKENS=max(_DRAFT_TOKENS, triton.next_power_of_2(n)), AT_ONCE=at_once,
        num_warps=8 if at_once == _MOST_AT_ONCE else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return accepted, chosen


def pick(law: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    empty = law.new_empty((law.shape[0], 0))
    return accept(empty, empty.unsqueeze(-1), law.unsqueeze(1), coins.unsqueeze(1))[1]
