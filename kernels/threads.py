"""How many threads of a processor compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiplications of an operation below which waking another thread takes longer than it saves.
# Idle threads sleep while an engine is in use (`triforce_offload.machine.openmp`): on a machine of
# two cores, 256 rows of 8 heads of 64 by 64 then take 15 ms with two threads and 2 ms with one.
_FEW_MULTIPLICATIONS = 8 << 20


@contextmanager
def threads_for(multiplications: int, device: torch.device) -> Iterator[None]:
    """Compute on one thread inside of the block if its operations are small. The number of threads
    is the calling thread's own.

    multiplications: of one operation
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1 or multiplications > _FEW_MULTIPLICATIONS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
