"""What matrices multiply: how large the inputs of each column are.

The larger the inputs of a column, the more its rounding errors change products. Rounding to few
bits therefore weighs errors by these sizes (AWQ, Lin et al., 2023, arXiv 2306.00978).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from triforce_kernels.weights.stored import StoredWeight

Weight = torch.Tensor | StoredWeight
# Rows whose squares are added at a time.
_ROWS = 64
# What a column counts at least, as a share of the mean, because other rows may use it more. For
# SmolLM2-135M it made no difference (docs/benchmarks.md, "Weights and KV read cheaply").
_LEAST = 0.1


class InputSizes:
    """Sums of squares of the inputs of matrices, by column. Each row is scaled to a mean square of
    1 first, so that a few rows with large numbers do not outweigh all others.
    """

    def __init__(self) -> None:
        # A sum stays with its weight, because only a weight that lives has an identity of its own.
        self._sums: dict[int, tuple[Weight, torch.Tensor]] = {}

    def add(self, x: torch.Tensor, weight: Weight) -> None:
        """Add rows x [..., in] that are multiplied by a weight."""
        _, total = self._sums.setdefault(
            id(weight), (weight, torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device))
        )
        for rows in x.flatten(0, -2).split(_ROWS):
            squares = rows.float().square()
            total += squares.div_(squares.mean(1, keepdim=True).clamp_(min=1e-30)).sum(0)

    def of(self, weight: Weight) -> torch.Tensor | None:
        """Return the sizes [in] float32 of a weight's columns: the sums, and a share of their mean.
        None if nothing was multiplied by it.
        """
        _, total = self._sums.get(id(weight), (None, None))
        return None if total is None else total + _LEAST * total.mean()


_adding: ContextVar[InputSizes | None] = ContextVar("input_sizes", default=None)


@contextmanager
def added_to(sizes: InputSizes) -> Iterator[None]:
    """Add the inputs of all products of `linear` inside of the block to `sizes`."""
    token = _adding.set(sizes)
    try:
        yield
    finally:
        _adding.reset(token)


def note(x: torch.Tensor, weight: Weight) -> None:
    """Add x to the input sizes that are being added to, if there are any."""
    if (sizes := _adding.get()) is not None:
        sizes.add(x, weight)
