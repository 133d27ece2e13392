"""How near the benchmarks' roundings to FP8, Q6_K and Q5_K are to normal numbers."""

from __future__ import annotations

import pytest
import torch

from bench.quantising import HIGH_BITS, by_high_bits, exact

# Root mean squares of what rounding changes, and of what high bits change then, as shares.
CHANGES = {"FP8": (0.027, 0.054), "Q6_K": (0.019, 0.077), "Q5_K": (0.038, 0.068)}


@pytest.mark.parametrize("kind", HIGH_BITS)
def test_roundings_are_near_the_numbers(kind: str) -> None:
    """Also of rows that are not whole blocks."""
    normal = torch.randn(60, 1088, generator=torch.Generator().manual_seed(0)) * 0.05
    rounded, near = exact(normal, normal, kind=kind), by_high_bits(normal, normal, kind=kind)
    assert rounded.shape == near.shape == normal.shape
    found = (rounded - normal).norm() / normal.norm(), (near - rounded).norm() / rounded.norm()
    assert [float(each) for each in found] == pytest.approx(CHANGES[kind], rel=0.05)
    assert float((near - rounded).mean().abs()) < 0.01 * float(rounded.std())


def test_zeros_stay_zeros() -> None:
    for kind in ("Q6_K", "Q5_K"):
        assert not exact(torch.zeros(2, 256), torch.zeros(0), kind=kind).any()
