"""The rates at which this machine copies and reads memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from frame import timed

_BYTES = 256 << 20
_REPEATS = 5


def memory_rates(threads: int) -> dict[str, float]:
    """Return bytes per second of copies by one thread and of reads by all, the best of five."""
    source = torch.ones(_BYTES // 4)
    target = torch.empty_like(source)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        copied = _best(lambda: target.copy_(source))
        torch.set_num_threads(threads)
        # A matrix-vector product reads the matrix once, as decoding does.
        matrix, vector = source.view(4096, -1), torch.ones(_BYTES // 4 // 4096)
        read = _best(lambda: matrix @ vector)
    finally:
        torch.set_num_threads(before)
    return {"copied_bytes_per_second": copied, "read_bytes_per_second": read}


def _best(run: Callable[[], object]) -> float:
    run()
    return _BYTES / min(timed(run) for _ in range(_REPEATS))
