"""What chunks are worth to groups of queries, against sums written out."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE, TOLERANCE, assert_near

from triforce_kernels.attention.scoring import group_scores


@pytest.mark.parametrize(
    ("heads", "tokens", "keys", "size", "chunk", "groups"),
    [(3, 5, 100, 8, 8, 5), (1, 17, 75, 4, 16, 8), (2, 3, 64, 8, 8, 3), (2, 20, 130, 16, 64, 8)],
)
def test_chunks_are_worth_the_mean_over_heads_and_tokens(
    backend, draw, heads, tokens, keys, size, chunk, groups
) -> None:
    scores = draw(2, heads * tokens, -(-keys // size) + 3)  # room for a longer text
    lse = draw(2, heads * tokens)
    out = torch.empty(groups, 2, -(-keys // chunk), dtype=torch.float32, device=DEVICE)
    group_scores(scores, lse, keys, size, chunk, tokens, out)
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for group in range(groups):
        members = [t for t in range(tokens) if t * groups // tokens == group]
        for c in range(out.shape[2]):
            pieces = range(c * chunk // size, min((c + 1) * chunk // size, -(-keys // size)))
            rows = [h * tokens + t for h in range(heads) for t in members]
            values = scores[:, rows][:, :, list(pieces)].double()
            total = (values - lse[:, rows].double().unsqueeze(-1)).exp().sum(-1)
            expected[group, :, c] = total.mean(-1)
    assert_near(out.cpu(), expected, TOLERANCE[torch.float32])


def test_a_chunk_that_nobody_saw_is_worth_nothing(backend, draw) -> None:
    scores, lse = draw(1, 2, 4), draw(1, 2)
    scores[:, :, 2] = float("-inf")
    lse[0, 1] = float("-inf")
    scores[0, 1] = float("-inf")
    out = torch.empty(1, 1, 4, dtype=torch.bfloat16, device=DEVICE)
    group_scores(scores, lse, 32, 8, 8, 2, out)
    assert out.isfinite().all()
    assert out[0, 0, 2] == 0


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    out = torch.empty(3, 2, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"group_scores cannot take .*keys 40.*out \(3, 2, 4\)"):
        group_scores(draw(2, 6, 8), draw(2, 6), 40, 8, 8, 3, out)
