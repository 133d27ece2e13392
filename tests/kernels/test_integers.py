"""Weights of 3 and 4 bits: how far off they are, and the product with them against float64."""

from __future__ import annotations

import pytest
import torch
from exactness import INTERPRETED, TOLERANCE, assert_near

from triforce_kernels.weights.integers import GROUPS, dequantise, integer_matmul, quantise


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(
    ("bits", "group"), [(bits, group) for bits, groups in GROUPS.items() for group in groups]
)
def test_weights_are_at_the_nearest_of_steps_that_suit_them(draw, dtype, bits, group) -> None:
    most = 2**bits - 1
    weight = draw(33, 2 * group, dtype=dtype)
    weight[3] = 0.25  # a group without a spread
    weight[5, 7] = 40.0  # and one with an outlier
    packed = quantise(weight, group, bits=bits)
    assert packed.shape == weight.shape
    assert (
        packed.nbytes == weight.numel() * bits // 8 + 2 * weight.numel() // group * dtype.itemsize
    )
    exact, found = weight.double(), dequantise(packed).double()
    step, least = (x.T.double().repeat_interleave(group, 1) for x in (packed.scale, packed.offset))
    # The scale and the offset are rounded to the dtype, the offset as coarsely as its size.
    rounding = torch.finfo(dtype).eps * ((most + 1) * step + exact.abs().max())
    reached = exact.clamp(least, least + most * step)
    assert ((found - reached).abs() <= step / 2 + rounding).all()
    # Steps over the whole range of a group are never better.
    groups = exact.unflatten(1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    even = (high - low).clamp_min(1e-12) / most
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


@pytest.mark.parametrize("bits", GROUPS)
def test_numbers_are_where_the_layout_says(bits) -> None:
    """Each number of a row of 64 is found by the bits of the class's description."""
    numbers = torch.arange(64) * 5 % (1 << bits)
    weight = quantise(numbers.float()[None].contiguous(), 64, bits=bits)
    stored = [int(byte) for byte in weight.packed[0]]
    for column, number in enumerate(numbers.tolist()):
        if bits == 4:
            assert stored[column % 32] >> 4 * (column // 32) & 15 == number
        else:
            low = stored[column % 16] >> 2 * (column // 16) & 3
            assert low | (stored[16 + column % 8] >> column // 8 & 1) << 2 == number


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(
    ("rows", "out", "width", "group", "bits"),
    [
        *((1, 40, 128, 32, 4), (17, 64, 128, 64, 4), (70, 33, 512, 256, 4)),
        *((1, 40, 128, 64, 3), (17, 64, 192, 64, 3), (70, 33, 576, 64, 3)),
    ],
)
def test_products_equal_those_with_the_dequantised_weight(
    backend, draw, rows, out, width, group, bits, dtype
) -> None:
    weight = quantise(draw(out, width, dtype=dtype), group, bits=bits)
    x = draw(rows, width + 8, dtype=dtype)[:, :width]
    exact = x.double() @ dequantise(weight).double().T
    assert_near(integer_matmul(x, weight), exact, TOLERANCE[dtype])


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    with pytest.raises(ValueError, match=r"quantise cannot take weight \(4, 48\).*group 32"):
        quantise(draw(4, 48), 32)
    with pytest.raises(ValueError, match=r"quantise cannot take .*inputs \(32,\)"):
        quantise(draw(4, 64), 32, draw(32))
    with pytest.raises(ValueError, match=r"quantise cannot take .*group 32.*bits 3"):
        quantise(draw(4, 64), 32, bits=3)
    weight = quantise(draw(4, 64), 32)
    with pytest.raises(
        ValueError, match=r"integer_matmul cannot take x \(2, 32\).*packed \(4, 32\)"
    ):
        integer_matmul(draw(2, 32), weight)
    with pytest.raises(ValueError, match=r"x .*float16"):
        integer_matmul(draw(2, 64).half(), weight)
