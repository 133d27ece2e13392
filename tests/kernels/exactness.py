"""Where kernels are tested, and how near they must come."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def assert_near(ours: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Relative to the greatest magnitude; what is infinite must be so in both."""
    finite = exact.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    assert torch.equal(ours[~finite].double(), exact[~finite].double())
    if finite.any():
        gap = (ours.double() - exact.double())[finite].abs().max()
        assert gap <= tolerance * exact[finite].abs().max().clamp_min(1e-30), float(gap)
