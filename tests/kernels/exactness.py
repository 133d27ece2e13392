"""Where kernels are tested, and how near they must come."""

from __future__ import annotations

import torch
from float_bounds import likely_gamma

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Terms of the longest sums that cases have: keys of attention and columns of a head, of a matrix.
_TERMS = 2000
# Of the greatest number that is computed. Sums are made in float32. Of half precision, a result and
# what it is made of are rounded once each.
TOLERANCE = {
    torch.float32: likely_gamma(_TERMS, torch.float32),
    torch.float16: 2 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
}
# What Triton's interpreter computes rightly.
INTERPRETED = (torch.float32, torch.float16)


def assert_near(ours: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Relative to the greatest magnitude; what is infinite must be so in both."""
    finite = exact.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    assert torch.equal(ours[~finite].double(), exact[~finite].double())
    if finite.any():
        gap = (ours.double() - exact.double())[finite].abs().max()
        assert gap <= tolerance * exact[finite].abs().max().clamp_min(1e-30), float(gap)
