"""P1: GGUF's blocks that are split into high and low bits come back to the last bit."""

from __future__ import annotations

from dataclasses import replace

import gguf
import pytest
import torch
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near
from gguf_files import in_blocks

from triforce_kernels import limits
from triforce_kernels.dispatch import implementation
from triforce_kernels.weights.block_types import BLOCK_TYPES, HIGH_QUANTS, BlockType
from triforce_kernels.weights.blocks import BlockWeight, block_matmul, decode, reference_decode
from triforce_kernels.weights.linear import StackedWeight, linear
from triforce_kernels.weights.split_blocks import split_matmul
from triforce_kernels.weights.split_quants import (
    LOW_BYTES,
    SplitQuantsWeight,
    reference_join,
    reference_split,
)
from triforce_offload.weights.formats import Blocks, Dense, Stack
from triforce_offload.weights.split_formats import SplitQuants, when_split

ROWS, COLUMNS = 21, 1280
KINDS = [BLOCK_TYPES[name] for name in HIGH_QUANTS]
of_each_type = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def anything(kind: BlockType, rows: int = ROWS) -> torch.Tensor:
    """Blocks of random bytes: every integer and every scale, NaN among these."""
    generator = torch.Generator().manual_seed(0)
    size = rows, kind.row_bytes(COLUMNS)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)


def numbers(kind: BlockType, rows: int = ROWS) -> torch.Tensor:
    """Normal numbers in blocks, as the gguf package quantises them."""
    normal = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(in_blocks(normal.numpy(), gguf.GGMLQuantizationType[kind.name]))


def split(blocks: torch.Tensor, kind: BlockType, step: int = 8) -> SplitQuantsWeight:
    """In a flat buffer that holds anything, written some rows at a time."""
    form = SplitQuants(len(blocks), COLUMNS, kind)
    weight = form.view(torch.full((form.nbytes,), 0xA5, dtype=torch.uint8, device=DEVICE))
    for first, part in weight.parts(step):
        part.write(blocks[first : first + part.shape[0]])
    return weight


@of_each_type
@pytest.mark.parametrize("step", [1, 5, ROWS])
def test_every_matrix_comes_back_to_the_last_bit(backend, kind: BlockType, step: int) -> None:
    blocks = anything(kind)
    weight = split(blocks, kind, step)
    assert weight.shape == (ROWS, COLUMNS)
    assert torch.equal(weight.join().cpu(), blocks)
    assert torch.equal(weight.rows(5, 12).join().cpu(), blocks[5:12])
    assert weight.rows(1, 1).join().shape == (0, blocks.shape[1])


@of_each_type
def test_a_split_matrix_takes_as_many_bytes(kind: BlockType) -> None:
    form, stored = SplitQuants(512, COLUMNS, kind), Blocks(512, COLUMNS, kind)
    assert when_split(stored) == form
    assert form.nbytes == stored.nbytes
    assert form.low_bytes == stored.nbytes * LOW_BYTES[kind.name] // kind.nbytes
    assert 4.5 <= 8 * form.draft_bytes / (512 * COLUMNS) < 4.57


@of_each_type
def test_every_implementation_splits_alike(backend, kind: BlockType) -> None:
    blocks = anything(kind)
    found = implementation("split_quants", blocks.device)(blocks, kind)
    for ours, theirs in zip(found, reference_split(blocks, kind), strict=True):
        assert torch.equal(ours, theirs)


@of_each_type
def test_high_bits_are_the_middle_of_what_has_them(backend, kind: BlockType) -> None:
    """Of numbers that differ in their low bits alone, which are the nearest ones."""
    blocks = numbers(kind)
    exact = reference_decode(blocks, kind, torch.float32)
    data, low = reference_split(blocks, kind)
    near = decode(data.to(DEVICE), HIGH_QUANTS[kind.name], torch.float32).cpu()
    least, most = (
        reference_decode(
            reference_join(data, torch.full_like(low, fill), kind), kind, torch.float32
        )
        for fill in (0, 255)
    )
    least, most = torch.minimum(least, most), torch.maximum(least, most)
    assert torch.all((least <= exact) & (exact <= most))
    assert torch.all((least <= near) & (near <= most))
    assert torch.all((near - exact).abs() <= 0.501 * (most - least))
    assert float((near - exact).mean().abs()) < 0.01 * float(exact.abs().mean())
    # About as near as 4 bits are: a step of a Gaussian's range of 5 standard deviations.
    assert 0.02 < float((near - exact).norm() / exact.norm()) < 0.11


@of_each_type
@pytest.mark.parametrize("dtype", INTERPRETED)
def test_products_have_the_bits_of_those_with_blocks(
    backend, draw, monkeypatch, kind: BlockType, dtype: torch.dtype
) -> None:
    """Some rows of the weight at a time, the last fewer, and beside other formats."""
    monkeypatch.setattr(limits, "JOINED_AT_ONCE", 8 * COLUMNS)
    monkeypatch.setattr(limits, "JOINED_AT_ONCE_ON_GPU", 8 * COLUMNS)
    blocks = numbers(kind)
    stored, weight = BlockWeight(blocks.to(DEVICE), kind, COLUMNS), split(blocks, kind)
    x = draw(3, COLUMNS + 8, dtype=dtype)[:, :COLUMNS]
    assert torch.equal(split_matmul(x, weight), block_matmul(x, stored))
    assert torch.equal(linear(x, weight), linear(x, stored))
    both = linear(x, StackedWeight((draw(3, COLUMNS, dtype=dtype), weight)))
    assert torch.equal(both[:, 3:], linear(x, stored))
    exact = x.double() @ decode(weight.data, weight.high_type, dtype).double().T
    assert_near(block_matmul(x, weight.high()), exact, TOLERANCE[dtype])


@of_each_type
def test_shapes_are_checked(kind: BlockType) -> None:
    weight = split(numbers(kind), kind)
    with pytest.raises(ValueError, match="join_quants cannot take"):
        replace(weight, low=weight.low[1:]).join()
    with pytest.raises(ValueError, match="join_quants cannot take"):
        replace(weight, low=weight.low.int()).join()
    with pytest.raises(ValueError, match="split_quants cannot take blocks"):
        weight.write(numbers(kind)[:, 2:])


def test_stacks_are_split_part_by_part() -> None:
    """A stack of types of which one cannot be split, as files of 4 bits have them."""
    five, four = BLOCK_TYPES["Q5_K"], BLOCK_TYPES["Q4_K"]
    dense = Dense((4, 256), torch.bfloat16)
    stored = Stack((Blocks(16, 256, five), Blocks(16, 256, four), dense))
    form = when_split(stored)
    assert form.parts == (SplitQuants(16, 256, five), *stored.parts[1:])
    assert form.split
    assert when_split(Blocks(16, 256, four)) == Blocks(16, 256, four)
    buffer = torch.zeros(form.nbytes, dtype=torch.uint8)
    rows = torch.randint(0, 256, (16, five.nbytes), dtype=torch.uint8)
    high, low = buffer[: form.high_bytes].clone(), buffer[form.high_bytes :].clone()
    for view in (form.view(buffer), form.joined(high, low)):
        view.parts[0].write(rows)
        assert torch.equal(view.parts[0].join(), rows)
    assert torch.equal(buffer[: form.high_bytes], high)
    assert form.high(high).shape == form.view(buffer).shape == (36, 256)
