"""Whole numbers of 8 bits: right to half a step, cut at the ends, only where they are asked for."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE, INTERPRETED

from triforce_kernels.kv.rounding import round_chunks, rounded, scale_of


def test_numbers_are_right_to_half_a_step_up_to_the_peak(draw) -> None:
    numbers = draw(7, 300)
    scale = scale_of(numbers.abs().amax(1, keepdim=True))
    whole = rounded(numbers, scale)
    assert whole.dtype == torch.int8
    assert ((whole * scale - numbers).abs() <= scale * 0.5001).all()
    assert (whole.abs().amax(1) == 127).all()
    cut = rounded(numbers * 3, scale)
    assert int(cut.min()) == -127
    assert int(cut.max()) == 127


def test_zeros_have_a_scale() -> None:
    zeros = torch.zeros(3, 4)
    scale = scale_of(zeros.amax(1, keepdim=True))
    assert (scale > 0).all()
    assert (rounded(zeros, scale) == 0).all()


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(("chunk", "head_dim"), [(8, 64), (4, 80), (1, 128), (64, 40)])
@pytest.mark.parametrize("sides", [1, 2])
def test_chunks_are_rounded_where_they_are_moved_and_nowhere_else(
    backend, draw, chunk, head_dim, dtype, sides
) -> None:
    layers, kv_heads, slots = 3, 2, 5
    # Both lie in larger buffers, the target among the chunks of a cache.
    room = draw(layers + 1, sides, kv_heads, slots, chunk, head_dim, dtype=dtype)
    numbers = room[:layers]
    cache = torch.full(
        (layers, sides, kv_heads, slots * chunk + 7, head_dim), 5, dtype=torch.int8, device=DEVICE
    )
    target = cache[:, :, :, : slots * chunk].unflatten(3, (slots, chunk))
    scale = draw(layers, sides, kv_heads, head_dim, dtype=torch.float32).abs() / 60 + 1e-3
    moves = torch.full((layers, kv_heads, slots), -1, device=DEVICE)
    moves[0, 1, 2] = moves[1, :, 0] = moves[2, 0] = 9
    moved = (moves >= 0)[:, None, :, :, None, None]
    # What is not moved may be anything.
    numbers.masked_fill_(~moved, float("nan"))
    round_chunks(moves, numbers, scale, target)
    expected = rounded(numbers.nan_to_num(), scale[:, :, :, None, None])
    assert torch.equal(target, torch.where(moved, expected, 5))
    target.fill_(5)
    assert (cache == 5).all(), "nothing else is written"


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    numbers, scale = draw(1, 2, 2, 3, 4, 16), draw(1, 2, 2, 16)
    moves = torch.zeros(1, 2, 3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"round_chunks cannot take .*target \(1, 2, 2, 3, 4, 16\)"
    ):
        round_chunks(moves, numbers, scale, numbers)
    with pytest.raises(ValueError, match=r"round_chunks cannot take moves \(1, 2, 2\)"):
        round_chunks(moves[..., :2], numbers, scale, numbers.to(torch.int8))
