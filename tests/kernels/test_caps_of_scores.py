"""Attention whose scores have a cap against softmax over all keys at once, in float64."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near
from test_streaming import CASES, Case, chunked, exact, make, run

from triforce_kernels.attention.streaming import attend_cache
from triforce_kernels.attention.text import attend_text

CAP = 0.5


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("case", [*CASES[:3], Case(1, 2, 3, 64, 600, 2, 530)])
def test_scores_may_have_a_cap(backend, draw, case: Case, dtype) -> None:
    """Of blocks, a tail and their chunks, of a cache and of a prompt, with and without a window."""
    query, keys, values = make(case, draw, dtype)
    out, lse, scores = exact(query, keys, values, case.tokens, cap=CAP)
    assert not torch.allclose(out, exact(query, keys, values, case.tokens)[0], atol=0.01)
    part, chunks = run(case, query, keys, values, scored=True, cap=CAP)
    assert_near(part.out, out, TOLERANCE[dtype])
    assert_near(part.lse, lse, TOLERANCE[dtype])
    expected = chunked(scores, case, float("-inf")).logsumexp(-1)
    assert_near(chunks.exp(), expected.exp(), TOLERANCE[dtype] * 4)
    before = keys.shape[1] - case.tokens
    whole = query.view(case.kv_heads * case.group, case.tokens, case.head_dim)
    for window in (None, 3, 20):
        out, lse, _ = exact(query, keys, values, case.tokens, cap=CAP, window=window)
        for end in (before, torch.tensor([before], device=DEVICE)):
            part = attend_cache(query, keys, values, case.tokens, end, window, cap=CAP)
            assert_near(part.out, out, TOLERANCE[dtype])
            assert_near(part.lse, lse, TOLERANCE[dtype])
        text = attend_text(whole, keys, values, window, cap=CAP)
        assert_near(text.out.view(out.shape), out, TOLERANCE[dtype])
