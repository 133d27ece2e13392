"""Parts of a checkpoint's tensors, read into weights of each kind."""

from __future__ import annotations

import pytest
import torch

from triforce_kernels.weights.block_types import ALL_TYPES
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.linear import dense_rows
from triforce_offload.checkpoint.reading import read_into
from triforce_offload.checkpoint.source import WHOLE, Corner
from triforce_offload.weights.split_formats import SplitBF16

Q8_0 = ALL_TYPES["Q8_0"]


class Stored:
    """A source with one matrix, and blocks of it."""

    def __init__(self, numbers: torch.Tensor, blocks: torch.Tensor) -> None:
        self._numbers, self._blocks = numbers, blocks

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        rows, columns = into.shape
        part = self._numbers[corner.row : corner.row + rows]
        into.copy_(part[:, corner.column : corner.column + columns])

    def read_blocks(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        rows, first = len(into), corner.column // Q8_0.elements * Q8_0.nbytes
        into.copy_(self._blocks[corner.row : corner.row + rows, first : first + into.shape[1]])


@pytest.mark.parametrize("kind", ["dense", "split", "blocks"])
def test_columns_that_do_not_follow_one_another_stand_side_by_side(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(40, 192, generator=generator).bfloat16()
    blocks = torch.randint(256, (40, 6 * Q8_0.nbytes), generator=generator).to(torch.uint8)
    source, columns = Stored(numbers, blocks), (range(32, 64), range(128, 192))
    rows = range(7, 31)
    expected = torch.cat([numbers[7:31, each.start : each.stop] for each in columns], 1)
    if kind == "blocks":
        into = BlockWeight(torch.zeros(24, 3 * Q8_0.nbytes, dtype=torch.uint8), Q8_0, 96)
        places = [1, 4, 5]
        expected = blocks[7:31].view(24, 6, -1)[:, places].reshape(24, -1)
    elif kind == "split":
        form = SplitBF16(24, 96)
        into = form.view(torch.zeros(form.nbytes, dtype=torch.uint8))
    else:
        into = torch.zeros(24, 96, dtype=torch.bfloat16)
    read_into(source, "matrix", into, Corner(rows.start, 0), None, columns)
    if kind == "split":
        into = torch.cat([part for _, part in dense_rows(into, torch.bfloat16)])
    assert torch.equal(into.data if kind == "blocks" else into, expected)
