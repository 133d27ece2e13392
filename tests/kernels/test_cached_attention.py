"""Attention over a cache that has the keys of the queries, in float64 beside it."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near
from test_streaming import CASES, Case, exact

from triforce_kernels.attention.streaming import attend_cache


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("case", "capacity", "end"),
    [
        (CASES[0], 48, 0),
        (CASES[1], 160, 100),
        (CASES[3], 64, 62),
        (Case(2, 8, 32, 64, 0, 0, 0), 128, 77),
    ],
)
def test_attention_over_a_cache(backend, draw, case, capacity, end, on_device, dtype) -> None:
    """Whatever lies behind the end, and with the heads of a larger buffer."""
    query = draw(case.kv_heads, case.rows, case.head_dim, dtype=dtype)
    buffer = draw(2, case.kv_heads, capacity + 3, case.head_dim, dtype=dtype)
    seen = end + case.tokens
    buffer[:, :, seen:] *= 100
    keys, values = buffer[:, :, :capacity]
    where = torch.tensor([end], device=DEVICE) if on_device else end
    out = attend_cache(query, keys, values, case.tokens, where).out
    expected, _, _ = exact(query, keys[:, :seen], values[:, :seen], case.tokens)
    assert_near(out, expected, TOLERANCE[dtype])


@pytest.mark.one_in(10)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 33, 64, 200])
@pytest.mark.parametrize(
    ("case", "capacity", "end"),
    [
        (CASES[0], 48, 0),
        (CASES[1], 160, 100),
        (CASES[3], 64, 62),
        (Case(2, 8, 32, 64, 0, 0, 0), 128, 77),
    ],
)
def test_attention_through_a_window(backend, draw, case, capacity, end, on_device, window) -> None:
    """Each row sees the last keys up to its own, in float64; other keys do not matter."""
    query = draw(case.kv_heads, case.rows, case.head_dim)
    keys, values = draw(2, case.kv_heads, capacity, case.head_dim)
    where = torch.tensor([end], device=DEVICE) if on_device else end
    out = attend_cache(query, keys, values, case.tokens, where, window).out
    last = end + torch.arange(case.rows, device=DEVICE).unsqueeze(1) % case.tokens
    columns = torch.arange(capacity, device=DEVICE)
    scores = query.double() @ keys.double().transpose(1, 2) * case.head_dim**-0.5
    scores.masked_fill_((columns > last) | (columns <= last - window), float("-inf"))
    assert_near(out, scores.softmax(-1) @ values.double(), TOLERANCE[torch.float32])
    hidden = max(0, end + 1 - window)
    keys[:, :hidden], values[:, :hidden] = 100.0, float("nan") if not on_device else 100.0
    again = attend_cache(query, keys, values, case.tokens, where, window).out
    assert_near(again, out.double(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("on_device", [False, True])
def test_attention_over_whole_numbers_is_that_over_the_same_in_any_dtype(
    backend, draw, on_device, dtype
) -> None:
    query = draw(2, 12, 80, dtype=dtype) / 16
    whole = draw(2, 2, 50, 80).mul(60).clamp(-127, 127).to(torch.int8)
    where = torch.tensor([40], device=DEVICE) if on_device else 40
    out = attend_cache(query, *whole, 3, where).out
    same = attend_cache(query, *whole.to(dtype), 3, where).out
    # What is converted in a GPU's registers may be multiplied by other instructions.
    assert_near(out, same, TOLERANCE[dtype] if DEVICE.type == "cuda" else 0.0)
