"""4-bit weights: how far off they are, and the product with them against float64."""

from __future__ import annotations

import pytest
import torch
from exactness import INTERPRETED, TOLERANCE, assert_near

from triforce_kernels.weights.int4 import GROUPS, dequantise, int4_matmul, quantise


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("group", GROUPS)
def test_weights_are_at_the_nearest_of_steps_that_suit_them(draw, dtype, group) -> None:
    weight = draw(33, 2 * group, dtype=dtype)
    weight[3] = 0.25  # a group without a spread
    weight[5, 7] = 40.0  # and one with an outlier
    packed = quantise(weight, group)
    assert packed.shape == weight.shape
    assert packed.nbytes == weight.numel() // 2 + 2 * weight.numel() // group * dtype.itemsize
    exact, found = weight.double(), dequantise(packed).double()
    step, least = (x.T.double().repeat_interleave(group, 1) for x in (packed.scale, packed.offset))
    # The scale and the offset are rounded to the dtype, the offset as coarsely as its size.
    rounding = torch.finfo(dtype).eps * (16 * step + exact.abs().max())
    reached = exact.clamp(least, least + 15 * step)
    assert ((found - reached).abs() <= step / 2 + rounding).all()
    # Steps over the whole range of a group are never better.
    groups = exact.unflatten(1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    even = (high - low).clamp_min(1e-12) / 15
    rounded = ((groups - low) / even).round() * even + low
    plain, ours = ((x.view_as(groups) - groups).square().sum(-1) for x in (rounded, found))
    assert (ours <= plain * 1.02 + (rounding.view_as(groups) ** 2).sum(-1)).all()
    assert ours.sum() < 0.9 * plain.sum()


def test_columns_count_as_their_inputs_are_large(draw) -> None:
    weight, sizes = draw(33, 256), draw(256).square() ** 3
    even, ours = (quantise(weight, 64, inputs) for inputs in (None, sizes))
    errors = [((dequantise(each) - weight).square() * sizes).sum() for each in (even, ours)]
    assert errors[1] < 0.8 * errors[0]
    # A group of columns whose inputs are all 0 is rounded as without sizes.
    sizes[64:128] = 0
    zeros = dequantise(quantise(weight, 64, sizes))
    assert torch.equal(zeros[:, 64:128], dequantise(even)[:, 64:128])
    assert torch.equal(zeros[:, :64], dequantise(ours)[:, :64])


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(
    ("rows", "out", "width", "group"), [(1, 40, 128, 32), (17, 64, 128, 64), (70, 33, 512, 256)]
)
def test_products_equal_those_with_the_dequantised_weight(
    backend, draw, rows, out, width, group, dtype
) -> None:
    weight = quantise(draw(out, width, dtype=dtype), group)
    x = draw(rows, width + 8, dtype=dtype)[:, :width]
    exact = x.double() @ dequantise(weight).double().T
    assert_near(int4_matmul(x, weight), exact, TOLERANCE[dtype])


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    with pytest.raises(ValueError, match=r"quantise cannot take weight \(4, 48\).*group 32"):
        quantise(draw(4, 48), 32)
    with pytest.raises(ValueError, match=r"quantise cannot take .*inputs \(32,\)"):
        quantise(draw(4, 64), 32, draw(32))
    weight = quantise(draw(4, 64), 32)
    with pytest.raises(ValueError, match=r"int4_matmul cannot take x \(2, 32\).*packed \(4, 32\)"):
        int4_matmul(draw(2, 32), weight)
    with pytest.raises(ValueError, match=r"x .*float16"):
        int4_matmul(draw(2, 64).half(), weight)
