"""First touch of new memory by many threads: most of the time goes to zeroing pages."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_PART_BYTES = 64 << 20
_MOST_THREADS = 16
_MADV_HUGEPAGE = 14
# Available since Linux 5.14.
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)


def touch(address: int, size: int, cpus: Sequence[int] = ()) -> None:
    """Back `size` bytes of a private mapping at `address` with zeroed pages.

    cpus: processors on which the threads run, so that the pages are in their memory node; any if
        empty
    """
    if not size:
        return
    # Pages of 2 MiB where the system has them: there are fewer faults, and registering is faster.
    _advise(address, size, _MADV_HUGEPAGE)
    parts = [
        (a, min(_PART_BYTES, address + size - a))
        for a in range(address, address + size, _PART_BYTES)
    ]
    threads = min(_MOST_THREADS, len(parts), len(cpus) or os.cpu_count() or 1)
    if threads == 1 and not cpus:
        for part in parts:
            _populate(*part)
        return

    def settle() -> None:
        if cpus:
            # This sets the affinity of this thread alone; a container may forbid it.
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)

    with ThreadPoolExecutor(threads, "first-touch", settle) as pool:
        for _ in pool.map(lambda part: _populate(*part), parts):
            pass


def _populate(address: int, size: int) -> None:
    # Both calls let other threads run meanwhile.
    if not _advise(address, size, _MADV_POPULATE_WRITE):
        ctypes.memset(address, 0, size)


def _advise(address: int, size: int, advice: int) -> bool:
    return _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice) == 0
