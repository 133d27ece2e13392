"""Chunk scores against plain softmax attention over all keys."""

from __future__ import annotations

import pytest
import torch
from triforce_kernels.attention import merge_weights, partial_attention
from triforce_kernels.scoring import chunk_mass, chunk_mean


@pytest.mark.parametrize("tokens", [8, 30, 64])
@pytest.mark.parametrize("chunk", [1, 4, 8])
def test_mass_is_the_softmax_summed_over_each_chunk(tokens: int, chunk: int) -> None:
    torch.manual_seed(tokens)
    query, key, value = (torch.randn(2, n, 16) for n in (5, tokens, tokens))
    mask = torch.zeros(5, tokens).masked_fill(torch.rand(5, tokens) < 0.3, float("-inf"))
    mask[:, 0] = 0
    for given in (None, mask):
        part = partial_attention(query, key, value, mask=given)
        mass = chunk_mass(query, key, part.lse, chunk, mask=given)
        scores = query @ key.transpose(1, 2) / 4 + (0 if given is None else given)
        shares = torch.nn.functional.pad(scores.softmax(-1), (0, -tokens % chunk))
        expected = shares.unflatten(-1, (-1, chunk)).sum(-1)
        torch.testing.assert_close(mass, expected)
        torch.testing.assert_close(mass.sum(-1), torch.ones(2, 5))


def test_pieces_weigh_as_their_attention_is_merged() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 8), torch.randn(2, 40, 8), torch.randn(2, 40, 8)
    pieces = [slice(0, 16), slice(16, 32), slice(32, 40)]
    parts = [partial_attention(query, key[:, p], value[:, p]) for p in pieces]
    masses = [
        chunk_mass(query, key[:, p], part.lse, 8) * weight.unsqueeze(-1)
        for p, part, weight in zip(pieces, parts, merge_weights(parts), strict=True)
    ]
    whole = chunk_mass(query, key, partial_attention(query, key, value).lse, 8)
    torch.testing.assert_close(torch.cat(masses, -1), whole)


def test_mean_is_the_query_times_the_mean_key() -> None:
    torch.manual_seed(1)
    query, key = torch.randn(2, 3, 16), torch.randn(2, 21, 16)
    scores = chunk_mean(query, key, 8)
    means = torch.stack([part.mean(1) for part in key.split(8, 1)], 1)
    torch.testing.assert_close(scores, query @ means.transpose(1, 2) / 4)
