"""What products note of their inputs."""

from __future__ import annotations

import torch

from triforce_kernels.weights.inputs import InputSizes, added_to
from triforce_kernels.weights.linear import linear


def test_inputs_are_added_by_column_and_every_row_counts_alike(draw) -> None:
    x, other, weights = draw(150, 8), draw(3, 8), [draw(5, 8) for _ in range(2)]
    # One row is a thousand times as large as the others, and one is of zeros.
    x[7] *= 1000
    x[9] = 0
    sizes = InputSizes()
    with added_to(sizes):
        plain = linear(x, weights[0])
        linear(other, weights[0])
    linear(draw(2, 8), weights[0])
    squares = torch.cat((x, other)).double().square()
    scaled = squares / squares.mean(1, keepdim=True).clamp_min(1e-30)
    sums = scaled.sum(0).float()
    torch.testing.assert_close(sizes.of(weights[0]), sums + sums.mean() / 10)
    assert sizes.of(weights[1]) is None
    assert torch.equal(plain, linear(x, weights[0]))
