"""What is computed around a mixer or an MLP with residual streams, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from exactness import INTERPRETED, TOLERANCE, assert_near

from triforce_kernels.layer import rms_norm
from triforce_kernels.streams.streams import add_to_streams, mean_of_gated, silu_of_mean

SHAPES = pytest.mark.parametrize(("rows", "count", "width"), [(1, 4, 40), (5, 3, 700)])


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("offset", [None, 1.0])
def test_each_stream_has_the_weight_of_its_norm(backend, draw, dtype, add, offset) -> None:
    x, weight = draw(5, 3, 70, dtype=dtype) * 3, draw(3, 70, dtype=dtype)
    delta = draw(5, 3, 70, dtype=dtype) if add else None
    alone = [
        rms_norm(x[:, i].clone(), weight[i], 1e-5, delta[:, i] if add else None, offset=offset)
        for i in range(3)
    ]
    total = x + delta if add else x.clone()
    together = rms_norm(x, weight, 1e-5, delta, offset=offset)
    assert torch.equal(together, torch.stack(alone, 1))
    assert torch.equal(x, total)
    with pytest.raises(ValueError, match="rms_norm cannot take"):
        rms_norm(x, weight[:2], 1e-5)


@pytest.mark.parametrize("dtype", INTERPRETED)
@SHAPES
def test_silu_of_a_mean(backend, draw, dtype, rows, count, width) -> None:
    sums = draw(rows, width, dtype=dtype) * 20
    exact = F.silu(sums.double() / count)
    assert_near(silu_of_mean(sums, count), exact, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", INTERPRETED)
@SHAPES
def test_mean_of_gated_streams(backend, draw, dtype, rows, count, width) -> None:
    gates, normed = (draw(rows, count * width, dtype=dtype) * 4 for _ in range(2))
    exact = (gates.double().sigmoid() * normed).view(rows, count, width).mean(1)
    assert_near(mean_of_gated(gates, normed, count), exact, 2 * TOLERANCE[dtype])
    with pytest.raises(ValueError, match="mean_of_gated cannot take"):
        mean_of_gated(gates, normed, 11)


@pytest.mark.parametrize("dtype", INTERPRETED)
@SHAPES
def test_an_output_is_added_to_each_stream(backend, draw, dtype, rows, count, width) -> None:
    streams, sums = draw(rows, count * width, dtype=dtype), draw(rows, count, dtype=dtype) * 9
    output = draw(rows, width, dtype=dtype)
    weights = 2 * (sums.double() / count).sigmoid()
    exact = streams.double() + (weights[..., None] * output.double()[:, None]).flatten(1)
    add_to_streams(streams, sums, output)
    assert_near(streams, exact, 2 * TOLERANCE[dtype])
    with pytest.raises(ValueError, match="add_to_streams cannot take"):
        add_to_streams(streams, sums[:, 1:].contiguous(), output)
