"""Partial attention against float64, and the merge law: the pieces add up to the whole."""

from __future__ import annotations

import pytest
import torch
from exactness import TOLERANCE, assert_near
from float_bounds import assert_within, attention_bound
from hypothesis import given, settings
from hypothesis import strategies as st

from triforce_kernels.attention import attention
from triforce_kernels.attention.attention import (
    Partial,
    attention_to_blocks,
    finite_mask,
    masses,
    merge,
    partial_attention,
    reference_attention,
    with_sinks,
)

SHAPES = [
    # kv_heads, rows, tokens, head_dim
    (1, 1, 1, 64),
    (3, 3, 512, 64),
    (2, 17, 513, 80),
    (4, 1, 7, 96),
    (1, 28, 100, 128),
    (2, 5, 33, 256),
    (2, 2, 31, 24),
]


def make(kv_heads: int, rows: int, tokens: int, head_dim: int, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((kv_heads, rows, head_dim), (kv_heads, tokens, head_dim), (kv_heads, tokens, head_dim))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def exact(query, key, value, mask=None):
    return reference_attention(
        query.double(), key.double(), value.double(), mask=None if mask is None else mask.double()
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_partial_matches_float64(shape, dtype) -> None:
    query, key, value = make(*shape, dtype=dtype)
    ours, reference = partial_attention(query, key, value), exact(query, key, value)
    assert_near(ours.out, reference.out, TOLERANCE[dtype])
    assert_near(ours.lse, reference.lse, TOLERANCE[dtype])
    assert ours.lse.dtype == torch.float32
    assert ours.out.dtype == dtype


@pytest.mark.parametrize("tokens", [1, 2, 31, 64])
def test_causal_equals_a_causal_mask(tokens: int) -> None:
    query, key, value = make(2, tokens, tokens, 64)
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)
    reference = exact(query, key, value, mask)
    for ours in (
        partial_attention(query, key, value, causal=True),
        partial_attention(query, key, value, mask=mask),
    ):
        assert_near(ours.out, reference.out, TOLERANCE[torch.float32])
        assert_near(ours.lse, reference.lse, TOLERANCE[torch.float32])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=7),
    st.integers(1, 9),
    st.sampled_from([8, 24, 64]),
    st.floats(0.1, 30),
)
def test_merged_pieces_equal_the_whole(pieces, rows, head_dim, sharpness) -> None:
    query, key, value = make(2, rows, sum(pieces), head_dim, seed=sum(pieces))
    query *= sharpness  # from nearly uniform to nearly one-hot
    parts = [
        partial_attention(query, k, v)
        for k, v in zip(key.split(pieces, 1), value.split(pieces, 1), strict=True)
    ]
    bound = attention_bound(query, key, value)
    assert_within(merge(parts).out, exact(query, key, value).out, bound)


def test_sinks_are_columns_of_the_softmax_without_values() -> None:
    query, key, value = make(6, 5, 40, 16)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(0))
    part = partial_attention(query, key, value)
    scores = query.double() @ key.double().transpose(1, 2) * 16**-0.5
    columns = torch.cat((scores, sinks.double().view(6, 1, 1).expand(6, 5, 1)), -1)
    shares = columns.softmax(-1)[..., :-1]
    assert_near(with_sinks(part, sinks), shares @ value.double(), TOLERANCE[torch.float32])
    assert_near(masses(part, sinks), columns.logsumexp(-1), TOLERANCE[torch.float32])
    assert with_sinks(part, None) is part.out
    assert masses(part, None) is part.lse
    # Query heads that share a key-value head are rows of it.
    grouped = Partial(part.out.view(2, 15, 16), part.lse.reshape(2, 15))
    assert torch.equal(with_sinks(grouped, sinks), with_sinks(part, sinks))


def test_nan_in_a_key_reaches_the_output() -> None:
    """What the emulated link relies on: reading a slot too early cannot go unseen."""
    query, key, value = make(2, 3, 64, 64)
    key[1, 40, 0] = float("nan")
    assert partial_attention(query, key, value).out[1].isnan().all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, k, v: (q[:, :, :32], k, v),
        lambda q, k, v: (q, k[:, :5], v),
        lambda q, k, v: (q.half(), k, v),
        lambda q, k, v: (q, k[:, :0], v[:, :0]),
        lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
    ],
)
def test_inputs_that_do_not_fit_are_all_reported(spoil) -> None:
    query, key, value = spoil(*make(2, 3, 16, 64))
    with pytest.raises(ValueError, match=r"query \(.*key \(.*value \("):
        partial_attention(query, key, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("tokens", [16, 512, 600])
def test_blocks_together_are_bitwise_those_one_by_one(
    tokens: int, rows: int, threads: int, dtype: torch.dtype
) -> None:
    """Whatever thread has which head: the library rounds fewer than four rows by where a thread's
    buffer lies.
    """
    blocks, kv_heads, head_dim = 5, 3, 64
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(kv_heads, rows, head_dim, generator=generator).to(dtype)
    size = (2, blocks, kv_heads, tokens, head_dim)
    key, value = torch.randn(size, generator=generator).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = attention_to_blocks(query, key, value)
        alone = [partial_attention(query, k, v) for k, v in zip(key, value, strict=True)]
        some = attention_to_blocks(query, key[:2], value[:2])
    finally:
        torch.set_num_threads(before)
    for part, one in zip(together, alone, strict=True):
        assert torch.equal(part.out, one.out)
        assert torch.equal(part.lse, one.lse)
    assert all(torch.equal(a.out, b.out) for a, b in zip(some, together, strict=False))


def block_by_block(query, key, value, mask, size: int) -> torch.Tensor:
    """As a kernel does it that has no case for keys of -inf alone, by powers of 2."""
    scale = query.shape[-1] ** -0.5
    total = torch.zeros(*query.shape[:2], 1)
    peak = torch.full_like(total, float("-inf"))
    out = torch.zeros(query.shape)
    pieces = zip(key.split(size, 1), value.split(size, 1), mask.split(size, 1), strict=True)
    for k, v, m in pieces:
        scores = (query.float() @ k.float().mT * scale + m.float()) * 1.4426950408889634
        highest = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, before = (scores - highest).exp2(), (peak - highest).exp2()
        total = total * before + weights.sum(-1, keepdim=True)
        out, peak = out * before + weights @ v.float(), highest
    return out / total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_whose_first_keys_are_hidden_is_a_number_whatever_computes_it(
    monkeypatch, dtype: torch.dtype
) -> None:
    rows, tokens = 5, 200
    query, key, value = make(2, rows, tokens, 16, dtype)
    mask = torch.zeros(rows, tokens, dtype=dtype)
    mask[0, :100] = mask[1, :199] = mask[2, 70:] = mask[3, ::2] = float("-inf")
    finite = finite_mask(mask)
    assert finite.isfinite().all()
    expected = reference_attention(query, key, value, mask=mask)
    found = reference_attention(query, key, value, mask=finite)
    assert torch.equal(expected.out, found.out)
    assert torch.equal(expected.lse, found.lse)
    assert block_by_block(query, key, value, mask, 64)[:, :2].isnan().all()
    near = block_by_block(query, key, value, finite, 64)
    torch.testing.assert_close(near, exact(query, key, value, mask).out.float())
    # That mask is what the kernel gets.
    given: list[torch.Tensor] = []

    def efficient(q, k, v, bias, *rest, scale: float):
        given.append(bias)
        return q, q[..., 0].float()

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", efficient)
    attention._cuda(query, key, value, mask, causal=False)
    assert torch.equal(given[0], finite.expand(1, 2, rows, tokens))
