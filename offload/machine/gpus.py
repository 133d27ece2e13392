"""Measures what the GPUs of a machine reach together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triforce_offload.machine.timing import seconds_of

# Bytes of a timed copy over a link, and of the smallest timed all-reduce; the largest all-reduce
# has as many bytes as the copy.
_LINK_BYTES = 64 << 20
_LEAST_SUM = 16 << 10


def measure_together() -> dict[str, Any]:
    """Measure the link of each GPU but the first, all links at once, and an all-reduce over all
    GPUs. Return them under the names of `Rates`. Raises RuntimeError.
    """
    import torch
    from torch.cuda import nccl

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    pinned = [torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in devices]
    there = [torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device) for device in devices]

    def settle() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    def copy(which: Sequence[int]) -> Callable[[], None]:
        def run() -> None:
            for i in which:
                there[i].copy_(pinned[i], non_blocking=True)

        return run

    def summing(nbytes: int) -> float:
        parts = [torch.zeros(nbytes // 2, dtype=torch.float16, device=it) for it in devices]
        return seconds_of(lambda: nccl.all_reduce(parts), settle)

    others = [_LINK_BYTES / seconds_of(copy([i]), settle) for i in range(1, len(devices))]
    together = seconds_of(copy(range(len(devices))), settle)
    least = summing(_LEAST_SUM)
    return {
        "other_links": tuple(others),
        "host_bytes_per_second": len(devices) * _LINK_BYTES / together,
        "all_reduce_seconds": least,
        "all_reduce_bytes_per_second": _LINK_BYTES / max(summing(_LINK_BYTES) - least, 1e-9),
    }
