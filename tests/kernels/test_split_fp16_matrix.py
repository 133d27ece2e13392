"""P1 for float16: the split format holds it to the last bit, and the high byte is a number."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE, TOLERANCE, assert_near

from triforce_kernels.weights.high_bits import HighBitsWeight, high_bits_matmul
from triforce_kernels.weights.high_bits import decode as decode_high_bits
from triforce_kernels.weights.linear import dense_rows, linear, lookup, rows_of
from triforce_kernels.weights.split_fp16 import SplitFP16Weight, join, join_rows, split_into
from triforce_offload.weights.formats import SplitFP16


def bits(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.contiguous().view(torch.int16).cpu()


def normal(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(rows, columns, generator=generator) * 0.02).half().to(DEVICE)


def split(matrix: torch.Tensor) -> SplitFP16Weight:
    """In a flat buffer that holds anything."""
    form = SplitFP16(*matrix.shape)
    weight = form.view(torch.full((form.nbytes,), 0xA5, dtype=torch.uint8, device=matrix.device))
    split_into(matrix, weight)
    return weight


@pytest.mark.parametrize("columns", [256, 255, 1])
def test_every_pattern_comes_back(columns: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(DEVICE)
    matrix = every[: (1 << 16) // columns * columns].view(-1, columns)
    weight = split(matrix)
    assert torch.equal(bits(join(weight)), bits(matrix))
    part = weight.rows(3, 40)
    assert torch.equal(bits(join(part)), bits(matrix[3:40]))
    index = torch.tensor([5, 0, 36], device=DEVICE)
    assert torch.equal(bits(join_rows(part, index)), bits(matrix[3:40][index]))
    assert torch.equal(bits(lookup(weight, index, torch.float16)), bits(matrix[index]))


def test_products_are_those_of_the_dense_matrix_to_the_last_bit(draw) -> None:
    matrix = normal(37, 200)
    weight = split(matrix)
    for rows in (1, 3, 17, 70):
        x = draw(rows, 200, dtype=torch.float16)
        assert torch.equal(linear(x, weight), linear(x, matrix))
    (whole,) = (part for _, part in dense_rows(rows_of(weight, 4, 9), torch.float32))
    assert torch.equal(whole, matrix[4:9].float())


def test_a_part_written_by_itself() -> None:
    matrix = normal(12, 30)
    weight = split(torch.zeros_like(matrix))
    split_into(matrix[5:8], weight.rows(5, 8))
    assert torch.equal(join(weight)[5:8], matrix[5:8])
    assert not join(weight)[:5].any()
    with pytest.raises(ValueError, match=r"split_into cannot take matrix \(12, 30\)"):
        split_into(matrix.float(), weight)


def test_high_bytes_are_within_an_eighth_of_every_number() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    matrix = every.view(256, 256).to(DEVICE)
    read = decode_high_bits(HighBitsWeight.of(split(matrix)))
    assert read.isfinite().all()
    magnitude = matrix.abs()
    normal_ones = magnitude.isfinite() & (magnitude >= 2.0**-14)
    gap = (read.double() - matrix.double()).abs() / magnitude.double()
    # 2 bits of mantissa, in the middle of what follows them: half of 2 ** -2 at most.
    assert gap[normal_ones].max() <= 1 / 8
    assert (read[~matrix.isfinite()] == 0).all()
    assert (read[matrix == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_with_high_bytes_are_those_of_the_numbers_they_say(
    backend, draw, dtype: torch.dtype
) -> None:
    matrix = normal(37, 200)
    matrix[7, 3:90] = 0
    matrix[8, :9] = float("inf")
    weight = HighBitsWeight.of(split(matrix))
    numbers = decode_high_bits(weight).double()
    for rows in (1, 5, 17):
        x = draw(rows, 208, dtype=dtype)[:, :200]
        found = high_bits_matmul(x, weight)
        assert_near(found, x.double() @ numbers.T, TOLERANCE[dtype])
        assert torch.equal(linear(x, weight), found)
    x = draw(70, 200, dtype=dtype)
    assert_near(linear(x, weight), x.double() @ numbers.T, TOLERANCE[dtype])
    with pytest.raises(ValueError, match=r"high_bits_matmul cannot take x \(2, 64\)"):
        high_bits_matmul(draw(2, 64), weight)
