"""Experts of which each is split for itself: no number is lost, and one's bytes are enough."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE

from triforce_kernels.weights.linear import dense_rows
from triforce_kernels.weights.split_bf16 import EXCEPTION, SplitError
from triforce_kernels.weights.split_experts import SplitExpertsWeight
from triforce_offload.weights.split_formats import SplitBF16, SplitExperts

COUNT, ROWS, COLUMNS = 5, 40, 96
FORMAT = SplitExperts(COUNT, SplitBF16(ROWS, COLUMNS))


def experts(draw) -> torch.Tensor:
    """Matrices with exceptions in some rows and none in others."""
    numbers = draw(COUNT * ROWS, COLUMNS).float()
    numbers[::4, :3] *= 1e-9
    return numbers.bfloat16()


def empty(form: SplitExperts = FORMAT) -> tuple[SplitExpertsWeight, torch.Tensor]:
    """A weight whose bytes may be anything so far, and these bytes."""
    buffer = torch.full((form.nbytes,), 171, dtype=torch.uint8, device=DEVICE)
    return form.view(buffer), buffer


def bits(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(torch.int16)


def test_no_bit_is_lost(draw) -> None:
    matrix, (weight, _) = experts(draw), empty()
    weight.write(matrix)
    assert weight.shape == matrix.shape
    assert torch.equal(bits(weight.joined()), bits(matrix))
    assert (weight.high == EXCEPTION).sum() > 100
    rows = torch.cat([rows for _, rows in dense_rows(weight, torch.bfloat16)])
    assert torch.equal(bits(rows), bits(matrix))


def test_parts_can_be_written_one_after_another(draw) -> None:
    """As files are read: some rows of one expert at a time, in ascending order."""
    matrix, (weight, _) = experts(draw), empty()
    for first, part in weight.parts(7):
        part.write(matrix[first : first + part.shape[0]])
    assert torch.equal(bits(weight.joined()), bits(matrix))
    part = weight.rows(2 * ROWS, 4 * ROWS)
    assert torch.equal(bits(part.joined()), bits(matrix[2 * ROWS : 4 * ROWS]))
    part = weight.rows(3 * ROWS + 7, 4 * ROWS)
    assert torch.equal(bits(part.joined()), bits(matrix[3 * ROWS + 7 : 4 * ROWS]))
    with pytest.raises(ValueError, match="rows 20 to 60 are parts of several experts of 40 rows"):
        weight.rows(20, 60)


def test_the_bytes_of_an_expert_are_enough(draw) -> None:
    """They can be copied to any place among others."""
    matrix, (weight, buffer) = experts(draw), empty()
    weight.write(matrix)
    form = FORMAT.of_share(2, COUNT)
    pool, there = empty(form)
    size = FORMAT.each.nbytes
    for slot, expert in enumerate((4, 1)):
        there[slot * size : (slot + 1) * size] = buffer[expert * size : (expert + 1) * size]
    expected = matrix.view(COUNT, ROWS, COLUMNS)[[4, 1]].flatten(0, 1)
    assert torch.equal(bits(pool.joined()), bits(expected))


def test_an_expert_with_too_many_exceptions_is_refused(draw) -> None:
    matrix, (weight, _) = experts(draw), empty()
    matrix[ROWS : 2 * ROWS, ::2] *= 1e-12
    with pytest.raises(SplitError, match="numbers of a matrix are far below the greatest"):
        weight.write(matrix)
