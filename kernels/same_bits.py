"""Whether a forward gives each row the same bits, whatever is computed beside it.

Kernels can do so with any number of rows: a processor's compiled ones always, those of a GPU with
tiles of one size. Prompts are faster with PyTorch's operators, whose sums depend on the number of
rows, and on a GPU few rows are faster with small tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from triforce_kernels.dispatch import REFERENCE, backend

_wanted: ContextVar[bool] = ContextVar("same_bits", default=False)


def can_hold(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether forwards on a device can give each row the same bits."""
    return backend(device) != REFERENCE and dtype.is_floating_point and dtype.itemsize <= 4


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Give each row the same bits inside of the block, if `wanted`."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted() -> bool:
    """Return whether the forward that runs is to give each row the same bits."""
    return _wanted.get()
