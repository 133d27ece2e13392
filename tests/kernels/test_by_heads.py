"""Products of which each head has a matrix of its own."""

from __future__ import annotations

import pytest
import torch
from exactness import INTERPRETED, TOLERANCE, assert_near
from test_experts import formats, numbers

from triforce_kernels.experts.heads import by_heads
from triforce_kernels.same_bits import same_bits

HEADS, OUT, IN = 5, 48, 64


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("form", ["dense", "int4", "int3", "split", "high", "blocks"])
@pytest.mark.parametrize("rows", [1, 16, 21, 70])
def test_each_head_is_multiplied_by_its_own_matrix(backend, draw, dtype, form, rows) -> None:
    weight = formats(draw, HEADS * OUT, IN, dtype)[form]
    # A part of something larger, as queries are.
    x = draw(rows, HEADS, IN + 8, dtype=dtype)[..., :IN]
    matrices = numbers(weight).double().view(HEADS, OUT, IN)
    expected = torch.einsum("rhi,hoi->rho", x.double(), matrices)
    found = by_heads(x, weight)
    assert (found.shape, found.dtype) == ((rows, HEADS, OUT), dtype)
    bound = TOLERANCE[dtype] * float(expected.abs().max())
    assert_near(found, expected, max(bound, TOLERANCE[dtype]))


@pytest.mark.parametrize("form", ["dense", "blocks"])
def test_a_row_has_the_same_bits_beside_others(backend, draw, form) -> None:
    if backend == "reference":
        pytest.skip("PyTorch's products depend on the number of rows")
    weight = formats(draw, HEADS * OUT, IN, torch.float32)[form]
    x = draw(70, HEADS, IN)
    with same_bits(True):
        together = by_heads(x, weight)
        for row in (0, 15, 16, 69):
            assert torch.equal(by_heads(x[row : row + 1], weight)[0], together[row])


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    with pytest.raises(ValueError, match=r"by_heads cannot take x \(3, 5, 64\).*weight"):
        by_heads(draw(3, HEADS, IN), draw(HEADS * OUT + 1, IN))
