"""Products whose depth is divided: each step is in one part, and rows do not decide how many."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triforce_kernels.weights.depth_triton import PROGRAMS, divided, steps_together


@pytest.mark.parametrize("columns", [1, 64, 1000, 4096, 11008, 128256])
@pytest.mark.parametrize("steps", [1, 2, 7, 64, 172, 448])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_step_is_in_one_part(columns: int, steps: int, dtype: torch.dtype) -> None:
    seen = set()
    for rows in (1, 17, 64):
        together = steps_together(64 if rows > 32 else 32, steps)
        x = torch.empty(rows, 8, dtype=dtype, device="meta")
        parts = divided(x, None, 0, columns, steps)
        tiles, groups, count = parts.grid(1)
        assert (tiles, count) == (1, parts.count)
        assert groups * parts.columns >= columns > (groups - 1) * parts.columns
        # A turn of the loop takes several steps and does not go beyond its part.
        assert parts.steps % together == 0
        assert (count - 1) * parts.steps < steps <= count * parts.steps
        assert count == 1 or -(-columns // 64) * count <= PROGRAMS
        shape = (rows, columns) if count == 1 else (count, rows, columns)
        assert parts.sums.shape == shape
        assert parts.sums.dtype == (dtype if count == 1 else torch.float32)
        seen.add((count, parts.steps))
    assert len(seen) == 1
