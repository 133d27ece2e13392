"""Rates at which this machine's processor computes with weights where they are in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from triforce_offload.machine.timing import seconds_of

# Together larger than any processor cache.
_MATRICES, _SIZE = 32, 2048
_MANY_ROWS = 64


class ProcessorRates(NamedTuple):
    """As in Hardware: `processor_bytes_per_second` and `host_flops_per_second`."""

    bytes_per_second: float
    flops_per_second: float


@cache
def measure_processor() -> ProcessorRates | None:
    """Measure products with matrices in bfloat16 by the compiled kernels, once per process; None
    without these kernels.
    """
    import torch

    from triforce_kernels.dispatch import HOST, KernelsError, backend
    from triforce_kernels.weights.linear import linear
    from triforce_offload.machine.profiles import PRODUCT_ROWS

    try:
        if backend(torch.device("cpu")) != HOST:
            return None
    except KernelsError:
        # Others were asked for, which may not run on a processor.
        return None
    size = (_SIZE, _SIZE)
    matrices = [torch.full(size, 0.01, dtype=torch.bfloat16) for _ in range(_MATRICES)]
    numbers = _MATRICES * _SIZE * _SIZE

    def products(rows: int) -> Callable[[], None]:
        x = torch.full((rows, _SIZE), 0.01, dtype=torch.bfloat16)

        def run() -> None:
            for matrix in matrices:
                linear(x, matrix)

        return run

    with torch.inference_mode():
        one, many = (seconds_of(products(rows)) for rows in (1, _MANY_ROWS))
    return ProcessorRates(2 * numbers / one, 2 * (_MANY_ROWS + PRODUCT_ROWS) * numbers / many)
