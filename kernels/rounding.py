"""Numbers as whole numbers of 8 bits, times a scale.

Rounding is floor(x + 1/2), which a GPU and a processor do alike.
"""

from __future__ import annotations

import torch

# The greatest whole number. -128 is not used, so that both signs reach as far.
MOST_WHOLE = 127


def rounded(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8, in the shape of the numbers: the nearest to each of -127 to 127 times its scale.

    scale: float32, positive, of a shape that spreads to the numbers'
    """
    whole = (numbers / scale).add_(0.5).floor_()
    return whole.clamp_(-MOST_WHOLE, MOST_WHOLE).to(torch.int8)


def scale_of(peak: torch.Tensor) -> torch.Tensor:
    """float32: the scale by which numbers up to `peak` are told apart best. Never 0."""
    return (peak.float() / MOST_WHOLE).clamp_(min=torch.finfo(torch.float32).tiny)
