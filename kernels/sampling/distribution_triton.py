"""Converts logits to distributions on a GPU: one program for each row.

The tokens that top-k and top-p keep are found as a threshold, bit by bit. That takes up to 32 sums
over the candidates, so these are first put on a short list: all tokens within some distance of the
most likely one, if they are few and all tokens farther away can be dropped. The distribution of a
language model nearly always allows that, and then a row is read four times. Otherwise the whole row
is searched. (vLLM's Triton sampler truncates before it searches, too: Park et al., "Qrita".)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import next_power_of_2
from triforce_kernels.order_triton import ordered

_MOST_AT_ONCE = 4096
# Largest number of candidates on a short list.
_SHORTLIST = 4096
# Distances from the greatest score within which candidates are searched, in natural logarithms.
_NEAR, _FAR = 6.0, 14.0


@triton.jit(do_not_specialize=["vocab"])
def _greedy_kernel(logits, out, l_row, vocab, AT_ONCE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * l_row
    out += row * vocab
    tops = tl.full([AT_ONCE], float("-inf"), tl.float32)
    places = tl.zeros([AT_ONCE], tl.int32)
    bad = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        bad |= (x != x).to(tl.int32)
        higher = x > tops
        places = tl.where(higher, column, places)
        tops = tl.where(higher, x, tops)
    peak = tl.max(tops)
    # Each lane has the first of its own greatest scores; if all are -inf there is no distribution.
    token = tl.min(tl.where(tops == peak, places, vocab))
    one = tl.where(tl.max(bad) > 0, float("nan"), peak - peak + 1.0)
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        tl.store(out + column, tl.where(column == token, one, 0.0), mask=column < vocab)


@triton.jit
def _scores(logits, column, there, temperature, peak):
    """Return scores relative to the greatest one, at most 0; -inf outside the vocabulary."""
    x = tl.load(logits + column, mask=there, other=float("-inf")).to(tl.float32)
    return tl.where(there, x / temperature - peak, float("-inf"))


@triton.jit
def _kth(scores, length, wanted, AT_ONCE: tl.constexpr):
    """Return the greatest key that at least `wanted` scores reach, bit by bit from the top."""
    least = tl.full([], -2147483648, tl.int32)
    bit = tl.full([], -2147483648, tl.int32)
    for _ in range(32):
        tried = least ^ bit
        counts = tl.zeros([AT_ONCE], tl.int32)
        for start in range(0, length, AT_ONCE):
            column = start + tl.arange(0, AT_ONCE)
            score = tl.load(scores + column, mask=column < length, other=float("-inf"))
            counts += ((ordered(score) >= tried) & (column < length)).to(tl.int32)
        least = tl.where(tl.sum(counts) >= wanted, tried, least)
        bit = (bit >> 1) & 0x7FFFFFFF
    return least


@triton.jit
def _mass(scores, length, least, key, AT_ONCE: tl.constexpr):
    """Return the sum of exponentials of scores with keys from `least` to below `key`."""
    sums = tl.zeros([AT_ONCE], tl.float32)
    for start in range(0, length, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        score = tl.load(scores + column, mask=column < length, other=float("-inf"))
        own = ordered(score)
        counts = (own >= least) & (own < key) & (column < length)
        sums += tl.where(counts, tl.exp(score), 0.0)
    return tl.sum(sums)


@triton.jit
def _nucleus(scores, length, least, dropped, most, AT_ONCE: tl.constexpr):
    """Find the tokens that top-p keeps, of scores whose keys are at least `least`.

    These are the tokens above a key, and all that equal the key but the first few. In ascending
    order tokens are dropped while their sum, with the mass `dropped` before, is at most `most`.

    Returns the key, how many of its equals are dropped, and the sum of exponentials of the kept
    ones.
    """
    edge = tl.full([], -2147483648, tl.int32)
    bit = tl.full([], -2147483648, tl.int32)
    for _ in range(32):
        tried = edge ^ bit
        mass = dropped + _mass(scores, length, least, tried, AT_ONCE)
        edge = tl.where(mass <= most, tried, edge)
        bit = (bit >> 1) & 0x7FFFFFFF
    tops = tl.full([AT_ONCE], -2147483648, tl.int32)
    for start in range(0, length, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        score = tl.load(scores + column, mask=column < length, other=float("-inf"))
        tops = tl.maximum(tops, tl.where(column < length, ordered(score), -2147483648))
    # By rounding, or for p = 0, all tokens might be dropped: the most likely one stays.
    highest = tl.max(tops)
    beyond = edge > highest
    edge = tl.minimum(edge, highest)
    sums = tl.zeros([AT_ONCE], tl.float32)
    equals = tl.zeros([AT_ONCE], tl.int32)
    below = tl.zeros([AT_ONCE], tl.float32)
    value = tl.zeros([AT_ONCE], tl.float32)
    for start in range(0, length, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        score = tl.load(scores + column, mask=column < length, other=float("-inf"))
        own = tl.where(column < length, ordered(score), -2147483648)
        power = tl.exp(score)
        same = (own == edge) & (column < length)
        sums += tl.where(own > edge, power, 0.0)
        below += tl.where((own < edge) & (own >= least), power, 0.0)
        equals += same.to(tl.int32)
        value = tl.maximum(value, tl.where(same, power, 0.0))
    count, each = tl.sum(equals), tl.max(value)
    spare = (most - dropped - tl.sum(below)) / each
    gone = tl.where(beyond, count - 1, tl.minimum(spare.to(tl.int32), count - 1))
    gone = tl.maximum(gone, 0)
    return edge, gone, tl.sum(sums) + (count - gone).to(tl.float32) * each


@triton.jit(do_not_specialize=["vocab", "top_k", "temperature", "top_p"])
def _distribution_kernel(
    logits, out, shortlist, l_row, temperature, top_k, top_p, vocab, near, far,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, AT_ONCE: tl.constexpr, SHORTLIST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * l_row
    out += row * vocab
    shortlist += row * SHORTLIST
    tops = tl.full([AT_ONCE], float("-inf"), tl.float32)
    bad = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        bad |= (x != x).to(tl.int32)
        tops = tl.where(x > tops, x, tops)
    peak = tl.where(tl.max(bad) > 0, float("nan"), tl.max(tops)) / temperature
    # Sums of exponentials beyond each distance, and counts of scores within it.
    wholes = tl.zeros([AT_ONCE], tl.float32)
    past_near = tl.zeros([AT_ONCE], tl.float32)
    past_far = tl.zeros([AT_ONCE], tl.float32)
    nears = tl.zeros([AT_ONCE], tl.int32)
    fars = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        score = _scores(logits, column, column < vocab, temperature, peak)
        power = tl.exp(score)
        wholes += tl.where(column < vocab, power, 0.0)
        if TOP_K or TOP_P:
            past_near += tl.where(score < -near, power, 0.0)
            past_far += tl.where(score < -far, power, 0.0)
            nears += (score >= -near).to(tl.int32)
            fars += (score >= -far).to(tl.int32)
    whole = tl.sum(wholes)
    edge, gone = tl.full([], -2147483648, tl.int32), 0
    kept = whole
    if TOP_K or TOP_P:
        near_count, far_count = tl.sum(nears), tl.sum(fars)
        if TOP_K:
            near_serves, far_serves = near_count >= top_k, far_count >= top_k
        else:
            most = (1.0 - top_p) * whole
            near_serves = tl.sum(past_near) <= most
            far_serves = tl.sum(past_far) <= most
        near_serves &= near_count <= SHORTLIST
        far_serves &= far_count <= SHORTLIST
        dropped = tl.where(near_serves, tl.sum(past_near), tl.sum(past_far))
        cut = tl.where(near_serves, -near, -far)
        scores, length = shortlist, tl.where(near_serves, near_count, far_count)
        if near_serves | far_serves:
            count = 0
            for start in range(0, vocab, AT_ONCE):
                column = start + tl.arange(0, AT_ONCE)
                score = _scores(logits, column, column < vocab, temperature, peak)
                listed = (score >= cut).to(tl.int32)
                found = tl.sum(listed)
                if found > 0:
                    place = count + tl.cumsum(listed, 0) - 1
                    tl.store(shortlist + place, score, mask=listed == 1)
                    count += found
        else:
            scores, length, dropped = out, vocab, 0.0
            for start in range(0, vocab, AT_ONCE):
                column = start + tl.arange(0, AT_ONCE)
                score = _scores(logits, column, column < vocab, temperature, peak)
                tl.store(out + column, score, mask=column < vocab)
        tl.debug_barrier()
        least = tl.full([], -2147483648, tl.int32)
        if TOP_K:
            least = _kth(scores, length, top_k, AT_ONCE)
            # Top-p takes its share of the mass that top-k kept.
            dropped = 0.0
            kept = _mass(scores, length, least, 2147483647, AT_ONCE)
            edge = least
        if TOP_P:
            most = (1.0 - top_p) * kept
            edge, gone, kept = _nucleus(scores, length, least, dropped, most, AT_ONCE)
        tl.debug_barrier()
    seen = 0
    for start in range(0, vocab, AT_ONCE):
        column = start + tl.arange(0, AT_ONCE)
        there = column < vocab
        score = _scores(logits, column, there, temperature, peak)
        key = ordered(score)
        stays = there & (key >= edge)
        if gone > 0:
            same = (there & (key == edge)).to(tl.int32)
            rank = seen + tl.cumsum(same, 0)
            seen += tl.sum(same)
            stays &= (same == 0) | (rank > gone)
        probs = tl.where(stays, tl.exp(score) / kept, 0.0)
        tl.store(out + column, tl.where(whole == whole, probs, float("nan")), mask=there)


def distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    at_once = min(_MOST_AT_ONCE, next_power_of_2(vocab))
    options = {"AT_ONCE": at_once, "num_warps": 16 if at_once == _MOST_AT_ONCE else 4}
    options["enable_fp_fusion"] = True
    if temperature == 0:
        _greedy_kernel[(rows,)](logits, out, logits.stride(0), vocab, **options)
        return out
    limits = 0 < top_k < vocab, top_p < 1
    size = _SHORTLIST if any(limits) else 1
    shortlist = torch.empty((rows, size), dtype=torch.float32, device=logits.device)
    _distribution_kernel[(rows,)](
        logits, out, shortlist, logits.stride(0), temperature, top_k, top_p, vocab, _NEAR, _FAR,
        TOP_K=limits[0], TOP_P=limits[1], SHORTLIST=size, **options,
    )  # fmt: skip
    return out
