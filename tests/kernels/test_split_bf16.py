"""P1: the split format holds bfloat16 to the last bit, whatever its bits are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness import DEVICE, TOLERANCE, assert_near

from triforce_kernels import dispatch
from triforce_kernels.dispatch import REFERENCE, TRITON
from triforce_kernels.weights.high_bits import HighBitsWeight, high_bits_matmul
from triforce_kernels.weights.high_bits import decode as decode_high_bits
from triforce_kernels.weights.linear import dense_rows, linear, lookup, rows_of
from triforce_kernels.weights.split_bf16 import (
    NOTHING,
    SplitBF16Weight,
    SplitError,
    check,
    decode,
    decode_rows,
    encode,
    encode_into,
    joined_at_once,
    split_matmul,
)
from triforce_offload.weights.split_formats import SplitBF16

ROWS, COLUMNS = 24, 96


def bits(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.contiguous().view(torch.int16).cpu()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the last bit, NaNs included."""
    return torch.equal(bits(found), bits(expected))


def normal(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16().to(DEVICE)


def split(matrix: torch.Tensor) -> SplitBF16Weight:
    """In a flat buffer that holds anything."""
    form = SplitBF16(*matrix.shape)
    weight = form.view(torch.full((form.nbytes,), 0xA5, dtype=torch.uint8, device=matrix.device))
    encode_into(matrix, weight)
    return weight


def patterns() -> torch.Tensor:
    """Every pattern of 16 bits, once: [256, 256]."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return every.view(256, 256).view(torch.bfloat16).to(DEVICE)


ALL_EXPONENTS = "every pattern beside those of other exponents"
MATRICES = {
    ALL_EXPONENTS: lambda: patterns().T.contiguous(),
    "every pattern beside those of its exponent": patterns,
    "of one value": lambda: torch.full((ROWS, COLUMNS), -3.0).bfloat16().to(DEVICE),
    "zeros": lambda: torch.zeros(ROWS, COLUMNS).bfloat16().to(DEVICE),
    "of mixed scale": lambda: normal() * torch.logspace(-30, 30, COLUMNS).to(DEVICE).bfloat16(),
    "exceptions only": lambda: torch.full((2, 8), torch.inf).bfloat16().to(DEVICE),
    "with zeros of both signs": lambda: normal().masked_fill_(normal() > 0.01, -0.0).tril(),
    "one infinite": lambda: normal().index_fill(1, torch.tensor([5], device=DEVICE), torch.inf),
    "subnormal": lambda: (normal() * 1e-38).bfloat16(),
    "more than are coded at a time": lambda: normal(300, 1000),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(ALL_EXPONENTS, marks=pytest.mark.slow), *list(MATRICES)[1:]],
)
def test_every_matrix_comes_back_to_the_last_bit(backend, name: str) -> None:
    if backend == "triton" and name.startswith("more"):
        pytest.skip("slow in the interpreter")
    matrix = MATRICES[name]()
    weight = encode(matrix)
    check(weight)
    assert same(decode(weight), matrix)
    index = torch.tensor([1, 0, matrix.shape[0] - 1, 1], device=matrix.device)
    assert same(decode_rows(weight, index), matrix[index])
    first, end = matrix.shape[0] // 3, matrix.shape[0] - 1
    assert same(decode(weight.rows(first, end)), matrix[first:end])


def test_every_pattern_in_every_position_of_a_row() -> None:
    """Beside a number of the greatest exponent it may have there, and one far from it."""
    every = patterns().flatten()
    for width in (2, 6):
        for position in range(width):
            for beside in (1.0, 2.0**-100, 2.0**100):
                matrix = torch.full((len(every), width), beside).bfloat16().to(DEVICE)
                matrix[:, position] = every
                assert same(decode(encode(matrix)), matrix)


def test_what_trained_weights_look_like_takes_twelve_bits_and_little_more() -> None:
    matrix = normal(1536, 576)
    form = SplitBF16(1536, 576)
    assert 8 * form.nbytes / matrix.numel() <= 12.1
    weight = split(matrix)
    check(weight)
    assert same(decode(weight), matrix)
    listed = int((weight.places != NOTHING).sum())
    # Numbers below the greatest of their row by 2 ** 13, of 4 standard deviations or so.
    assert 2e-4 < listed / matrix.numel() < 6e-4
    assert listed < 0.4 * len(weight.places)


def test_parts_are_written_one_after_the_other_and_again() -> None:
    matrix = normal(96, 512)
    matrix[::7, ::11] = 1e-20
    form = SplitBF16(96, 512)
    roomy = replace(
        split(normal(96, 512)),
        places=torch.full((8000,), 7, dtype=torch.int32, device=DEVICE),
        patterns=torch.zeros(8000, dtype=torch.int16, device=DEVICE),
    )
    for _ in range(2):
        for first, end in ((0, 10), (10, 50), (50, 96)):
            encode_into(matrix[first:end], roomy.rows(first, end))
        check(roomy)
        assert same(decode(roomy), matrix)
    with pytest.raises(SplitError, match=r"more than \d+ numbers of a matrix are far below"):
        encode_into(matrix, form.view(torch.zeros(form.nbytes, dtype=torch.uint8, device=DEVICE)))
    with pytest.raises(ValueError, match="encode_into of"):
        encode_into(matrix, roomy.rows(0, 95))
    for odd in (normal(4, 5), normal().float()):
        with pytest.raises(ValueError, match="encode cannot take"):
            encode(odd)


@pytest.mark.parametrize(
    "damage",
    [
        lambda places: places.fill_(NOTHING),
        lambda places: places.fill_(0),
        lambda places: places.fill_(-1),
        lambda places: places.fill_(NOTHING - 1),
        lambda places: places.copy_(places.flip(0)),
        lambda places: places.add_(1),
    ],
)
def test_a_damaged_list_is_refused_and_never_written_past_its_rows(backend, damage) -> None:
    matrix = normal()
    matrix[3, ::9] = 1e-20
    matrix[20, 7] = 1e-20
    weight = split(matrix)
    damage(weight.places)
    with pytest.raises(SplitError, match="exceptions is not that of the"):
        check(weight)
    # Wrong, but of these rows alone, and no more of it than was coded as exceptions or listed.
    found = decode(weight.rows(1, 22))
    assert found.shape == (21, COLUMNS)


@pytest.mark.parametrize("starts", [[0, 7, 13], [5, 5, 5], [-9, 1 << 30, 1 << 30], [0, 0, 0]])
def test_where_exceptions_begin_is_checked_and_never_read_past(backend, draw, starts) -> None:
    matrix = normal(40, 64)
    matrix[3, :6] = matrix[35, :4] = 1e-20
    weight = encode(matrix)
    assert weight.starts.tolist() == [0, 6, 10]
    check(weight)
    weight.starts.copy_(torch.tensor(starts))
    with pytest.raises(SplitError, match="exceptions is not that of the"):
        check(weight)
    assert split_matmul(draw(2, 64), weight).isfinite().all()


def test_a_gpu_with_kernels_decodes_larger_slices(monkeypatch) -> None:
    gpu = torch.device("cuda", 0)
    for computed, numbers in ((TRITON, 64 << 20), (REFERENCE, 2 << 20)):
        monkeypatch.setattr(dispatch, "_backend", lambda device, forced, by=computed: by)
        assert joined_at_once(gpu) == numbers
        assert joined_at_once(torch.device("cpu")) == 2 << 20
    # As many rows as that are a slice.
    weight = encode(normal(5, 64))
    for numbers, steps in ((128, [0, 2, 4]), (1 << 20, [0])):
        monkeypatch.setattr(
            "triforce_kernels.weights.split_bf16.joined_at_once", lambda _, n=numbers: n
        )
        assert [first for first, _ in weight.slices()] == steps


def test_products_and_lookups_are_those_of_the_dense_matrix(backend, draw) -> None:
    """To the last bit, but for products with few rows by a kernel of its own."""
    matrix = normal(40, 64)
    matrix[7, 3:9] = 1e-20
    matrix[9, 3:60] = 0
    weight = split(matrix)
    for rows in (1, 3, 9, 70):
        x = draw(rows, 64, dtype=torch.bfloat16)
        if backend == REFERENCE or rows > 64:
            assert same(linear(x, weight), linear(x, matrix))
    index = torch.tensor([7, 39, 0], device=DEVICE)
    assert same(lookup(weight, index, torch.bfloat16), matrix[index])
    assert same(torch.cat([rows for _, rows in dense_rows(weight, torch.bfloat16)]), matrix)
    assert same(decode(rows_of(weight, 5, 9)), matrix[5:9])


@pytest.mark.first
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_with_few_rows_count_every_exception(backend, draw, dtype: torch.dtype) -> None:
    matrix = normal(75, 200)
    # Large ones, so that each is missed: the rows' other numbers are what is out of range.
    matrix[2:70:3, 11] = 1000.0
    matrix[40, 5:60] = -2000.0
    matrix[50] = 0
    weight = encode(matrix)
    assert len(weight.places) > 1000
    parts = (weight, weight.rows(32, 64), weight.rows(33, 75), weight.rows(3, 34))
    for part, rows in zip(parts, (17, 1, 5, 1), strict=True):
        x = draw(rows, 208, dtype=dtype)[:, :200]
        numbers = decode(part).to(dtype).double()
        assert_near(split_matmul(x, part), x.double() @ numbers.T, TOLERANCE[dtype])
    with pytest.raises(ValueError, match=r"split_matmul cannot take x \(2, 64\)"):
        split_matmul(draw(2, 64), weight)


def test_upper_planes_are_within_a_sixteenth_of_every_number_but_exceptions() -> None:
    matrix = normal(300, 200)
    matrix[5, ::9] = 1e-20
    weight = encode(matrix)
    read = decode_high_bits(HighBitsWeight.of(weight)).float()
    listed = torch.zeros(matrix.numel(), dtype=torch.bool, device=DEVICE)
    listed[weight.places.long()] = True
    listed = listed.view(matrix.shape)
    assert (read[listed] == 0).all()
    # 3 bits of mantissa, in the middle of what follows them: half of 2 ** -3 at most. 4 bits of
    # numbers in the high two powers of two of their row.
    size = matrix.float().abs()
    gap = (read - matrix.float()).abs() / size
    assert gap[~listed].max() <= 1 / 16
    greatest = 2.0 ** size.amax(1, keepdim=True).log2().floor()
    large = ~listed & (size >= greatest / 2)
    assert 0.1 < large.float().mean() < 0.9
    assert gap[large].max() <= 1 / 32
    assert 0.01 < gap[~listed].mean() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_with_high_bits_planes_are_those_of_the_numbers_they_say(
    backend, draw, dtype: torch.dtype
) -> None:
    matrix = normal(37, 200)
    matrix[7, 3:90] = 1e-20
    matrix[8, 3:90] = 0
    weight = HighBitsWeight.of(encode(matrix))
    numbers = decode_high_bits(weight).double()
    for rows in (1, 5, 17):
        x = draw(rows, 208, dtype=dtype)[:, :200]
        exact = x.double() @ numbers.T
        found = high_bits_matmul(x, weight)
        assert_near(found, exact, TOLERANCE[dtype])
        assert torch.equal(linear(x, weight), found)
    # Many rows decode it first.
    x = draw(70, 200, dtype=dtype)
    assert_near(linear(x, weight), x.double() @ numbers.T, TOLERANCE[dtype])
    with pytest.raises(ValueError, match=r"high_bits_matmul cannot take x \(2, 64\)"):
        high_bits_matmul(draw(2, 64), weight)
