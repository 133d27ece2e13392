"""P1: FP8 that is split into high and low bits comes back to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near

from triforce_kernels import limits
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.block_types import F8_E4M3, F8_HIGH
from triforce_kernels.weights.blocks import F8_LEVELS, BlockWeight, block_matmul, decode
from triforce_kernels.weights.linear import StackedWeight, linear
from triforce_kernels.weights.split_bf16 import SplitError
from triforce_kernels.weights.split_blocks import split_matmul
from triforce_kernels.weights.split_fp8 import (
    LEAST_BASE,
    LOW_BITS,
    SplitFP8Weight,
    join,
    reference_split,
    split_into,
)
from triforce_offload.weights.formats import Blocks, Dense, Stack
from triforce_offload.weights.split_formats import SplitFP8, when_split

ROWS, COLUMNS = 21, 1280


def in_blocks(numbers: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Bits of FP8 [rows, columns] uint8 with scales [rows, columns / 128] in blocks."""
    count = numbers.shape[1] // 128
    if scales is None:
        scales = torch.rand(len(numbers), count, generator=torch.Generator().manual_seed(1)) * 1e-3
    parts = numbers.unflatten(1, (-1, 128)), scales.unsqueeze(-1).view(torch.uint8)
    return torch.cat(parts, 2).flatten(1)


def normal(rows: int = ROWS, columns: int = COLUMNS, size: float = 110.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(rows, columns, generator=generator) * size
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def split(blocks: torch.Tensor, step: int = 8, room: int | None = None) -> SplitFP8Weight:
    """In a flat buffer that holds anything, written some rows at a time. room: bytes of low bits"""
    form = SplitFP8(len(blocks), blocks.shape[1] // F8_E4M3.nbytes * 128)
    weight = form.view(torch.full((form.nbytes,), 0xA5, dtype=torch.uint8, device=DEVICE))
    if room:
        weight = replace(weight, low=torch.full((room,), 0xA5, dtype=torch.uint8, device=DEVICE))
    for first, part in weight.parts(step):
        part.write(blocks[first : first + part.shape[0]])
    return weight


def every() -> torch.Tensor:
    """Every pattern of 8 bits, NaN included, beside every other: the base of each block is 15."""
    return torch.arange(256).to(torch.uint8).repeat(2).view(1, 512)


NUMBERS = {
    "normal": normal,
    "every pattern": every,
    "of one exponent a block": lambda: torch.arange(16).repeat_interleave(128).view(1, -1) << 3,
    "small": lambda: normal(size=0.01),
    "zeros of both signs": lambda: normal() & 128,
    "one large number in each row": lambda: normal(size=3).index_fill_(1, torch.tensor([77]), 126),
    "rows of different size": lambda: torch.cat([normal(3, size=s) for s in (100, 1, 0.1, 30)]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_matrix_comes_back_to_the_last_bit(backend, name: str) -> None:
    blocks = in_blocks(NUMBERS[name]().to(torch.uint8))
    weight = split(blocks, room=8 * blocks.numel())
    assert torch.equal(join(weight).cpu(), blocks)
    first, end = len(blocks) // 3, len(blocks)
    assert torch.equal(join(weight.rows(first, end)).cpu(), blocks[first:end])
    assert join(weight.rows(1, 1)).shape == (0, blocks.shape[1])
    # Nothing beyond the last low bits is read.
    full = replace(weight, low=weight.low[: int(weight.starts[-1])].clone())
    assert torch.equal(join(full).cpu(), blocks)


@pytest.mark.parametrize("step", [1, 5, ROWS])
def test_rows_are_written_some_at_a_time(step: int) -> None:
    blocks = in_blocks(normal())
    expected, found = split(blocks, ROWS), split(blocks, step)
    assert torch.equal(found.data, expected.data)
    assert torch.equal(found.starts, expected.starts)
    used = int(expected.starts[-1])
    assert torch.equal(found.low[:used], expected.low[:used])


def test_the_format_takes_as_many_bits_as_documents_say() -> None:
    form = SplitFP8(5120, 17408)
    numbers = form.rows * form.columns
    assert 5.25 <= 8 * form.high_bytes / numbers < 5.26
    assert 8 * form.nbytes / numbers < 8.2 < 8 * Blocks(5120, 17408, F8_E4M3).nbytes / numbers
    used = int(split(in_blocks(normal(40))).starts[-1])
    assert 2.0 < 8 * used / normal(40).numel() < 2.2 < 8 * 23 / 64


def test_numbers_with_long_tails_have_room() -> None:
    """Those of a Laplace distribution, where normal ones have .7 bits less."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(64, COLUMNS, generator=generator) - 0.5
    numbers = -numbers.sign() * (1 - 2 * numbers.abs()).log()
    bits = (numbers * 448 / numbers.abs().max()).to(torch.float8_e4m3fn).view(torch.uint8)
    weight = split(in_blocks(bits))
    assert 2.7 < 8 * int(weight.starts[-1]) / numbers.numel() < 2.9


@pytest.mark.parametrize("name", NUMBERS)
def test_every_implementation_splits_alike(backend, name: str) -> None:
    blocks = in_blocks(NUMBERS[name]().to(torch.uint8))
    found = implementation("split_fp8", blocks.device)(blocks)
    for ours, theirs in zip(found, reference_split(blocks), strict=True):
        assert ours.dtype == theirs.dtype or ours.numel() == len(blocks) + 1
        assert torch.equal(ours.long(), theirs.long())


def test_high_bits_are_near_the_numbers(backend) -> None:
    """The mean of the numbers with a code, rounded; for code 0 half of the least one above."""
    blocks = in_blocks(normal())
    weight = split(blocks)
    exact = decode(blocks, F8_E4M3, torch.float32)
    near = decode(weight.data, F8_HIGH, torch.float32).cpu()
    assert 0.05 < float((near - exact).norm() / exact.norm()) < 0.06
    assert torch.equal(near < 0, exact.signbit())
    # All numbers of a block whose greatest has the field 15, with a scale of 1.
    bits = torch.arange(128).to(torch.uint8).view(1, 128)
    bits[0, 127] = 126
    ones = torch.ones(1, 1)
    near = decode(split(in_blocks(bits, ones), room=200).data, F8_HIGH, torch.float32).cpu()[0]
    exact = bits.view(torch.float8_e4m3fn).float()[0]
    levels = torch.tensor(F8_LEVELS) * 4
    assert sorted(set(near.tolist())) == levels.tolist()
    for level in levels[1:]:
        of_code = near == level
        assert of_code.sum() == (8 if level == 24 else 4 if level in (36, 52) else 2)
        assert abs(exact[of_code].mean() / level - 1) < 0.06
    assert torch.equal(near == 8, exact < 16)


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_products_have_the_bits_of_those_with_blocks(backend, draw, monkeypatch, dtype) -> None:
    """Some rows of the weight at a time, the last fewer, and beside other formats. With more rows a
    GPU divides the depth otherwise.
    """
    monkeypatch.setattr(limits, "JOINED_AT_ONCE", 8 * COLUMNS)
    monkeypatch.setattr(limits, "JOINED_AT_ONCE_ON_GPU", 8 * COLUMNS)
    blocks = in_blocks(normal())
    stored, weight = BlockWeight(blocks.to(DEVICE), F8_E4M3, COLUMNS), split(blocks)
    for rows in (1, 3):
        x = draw(rows, COLUMNS + 8, dtype=dtype)[:, :COLUMNS]
        expected = block_matmul(x, stored)
        assert torch.equal(split_matmul(x, weight), expected)
        assert torch.equal(linear(x, weight), linear(x, stored))
        dense = draw(3, COLUMNS, dtype=dtype)
        both = linear(x, StackedWeight((dense, weight)))
        assert torch.equal(both[:, 3:], linear(x, stored))
        high = BlockWeight(weight.data, F8_HIGH, COLUMNS)
        exact = x.double() @ decode(weight.data, F8_HIGH, dtype).double().T
        assert_near(block_matmul(x, high), exact, TOLERANCE[dtype])


def test_many_rows_are_multiplied_as_those_of_blocks_are(monkeypatch) -> None:
    monkeypatch.setattr(limits, "JOINED_AT_ONCE", 8 * COLUMNS)
    monkeypatch.setattr(limits, "JOINED_AT_ONCE_ON_GPU", 8 * COLUMNS)
    blocks = in_blocks(normal())
    x = torch.randn(limits.FEW_ROWS + 3, COLUMNS).to(DEVICE)
    stored = BlockWeight(blocks.to(DEVICE), F8_E4M3, COLUMNS)
    assert_near(linear(x, split(blocks)), linear(x, stored).double(), TOLERANCE[torch.float32])


def test_what_has_no_room_is_refused() -> None:
    blocks = in_blocks(torch.zeros(ROWS, COLUMNS, dtype=torch.uint8))
    with pytest.raises(SplitError, match="low bits of a matrix take more than 9681 bytes"):
        split(blocks)
    tiny = torch.full((ROWS, COLUMNS // 128), 2.0**-145)
    with pytest.raises(SplitError, match="a scale of FP8 is too small"):
        split(in_blocks(normal(size=0.02), tiny), room=1 << 16)
    with pytest.raises(ValueError, match="split_into cannot take blocks"):
        split_into(blocks[:, 132:], split(in_blocks(normal())))


def test_a_damaged_matrix_reads_nothing_else(backend) -> None:
    """Its numbers are wrong, and do not depend on what stands beside its low bits. The reads of a
    GPU are not checked.
    """
    if backend == "triton":
        pytest.skip("reads where a list says")
    weight = split(in_blocks(normal()))
    wrong = replace(weight, starts=torch.full_like(weight.starts, 2**31 - 1))
    found = []
    for beside in (0, 255):
        around = torch.full((len(weight.low) + 128,), beside, dtype=torch.uint8)
        low = around[64:-64]
        low.copy_(weight.low)
        found.append(join(replace(wrong, low=low)))
    assert found[0].shape == (ROWS, F8_E4M3.row_bytes(COLUMNS))
    assert torch.equal(*found)


def test_shapes_are_checked() -> None:
    weight = split(in_blocks(normal()))
    with pytest.raises(ValueError, match="join_fp8 cannot take"):
        join(replace(weight, starts=weight.starts[1:]))
    with pytest.raises(ValueError, match="join_fp8 cannot take"):
        join(replace(weight, bases=weight.bases.int()))


def test_codes_say_what_the_table_says() -> None:
    """All numbers of a block with the base 15, or the least base, have as many low bits."""
    for base in (15, LEAST_BASE):
        magnitudes = torch.arange(8 * base + 8 - (base == 15)).to(torch.uint8)
        for magnitude in magnitudes.tolist():
            bits = torch.zeros(1, 128, dtype=torch.uint8)
            bits[0, 0], bits[0, 1] = magnitudes[-1], magnitude
            used = 8 * int(split(in_blocks(bits), room=200).starts[-1])
            below = base - (magnitude >> 3)
            expected = {0: 1, 1: 1, 2: 1, 3: 2, 4: 3}.get(below, 7)
            assert expected in LOW_BITS
            assert used == -(-(1 + expected + 126 * 7) // 8) * 8


def test_stacks_are_split_part_by_part() -> None:
    stored = Stack((Blocks(16, 256, F8_E4M3), Dense((4, 256), torch.bfloat16)))
    form = when_split(stored)
    assert form.parts == (SplitFP8(16, 256), stored.parts[1])
    assert form.split
    assert not stored.split
    assert when_split(form) == form
    buffer = torch.zeros(form.nbytes, dtype=torch.uint8)
    high, low = buffer[: form.high_bytes].clone(), buffer[form.high_bytes :].clone()
    numbers = torch.randn(4, 256).bfloat16()
    for view in (form.view(buffer), form.joined(high, low)):
        view.parts[0].write(in_blocks(normal(16, 256)))
        view.parts[1].copy_(numbers)
    assert torch.equal(buffer[: form.high_bytes], high)
    assert torch.equal(buffer[form.high_bytes :], low)
    assert form.high(high).shape == form.view(buffer).shape == (20, 256)
    assert torch.equal(form.high(high).parts[1], numbers)
    assert form.draft_bytes == 16 * 2 * F8_HIGH.nbytes + numbers.nbytes
