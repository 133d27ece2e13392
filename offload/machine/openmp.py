"""Idle OpenMP threads sleep instead of busy-waiting, where torch was loaded before this package."""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
from functools import cache

import torch

from triforce_kernels.host.library import openmp_libraries

# Each of these sets how long an idle thread busy-waits: by the user's choice, or by `offload`.
_CHOSEN_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_busy_waiting() -> None:
    """Make idle OpenMP threads of this process sleep soon, unless the environment already does.

    GNU's OpenMP library reads its environment only when it is loaded. It also shortens busy-waiting
    from 300,000 rounds to 100 while the process has more OpenMP threads than there are processors.
    A team of that size, which sleeps for the life of the process, makes the library do so.
    """
    if torch.get_num_threads() > 1 and not any(name in os.environ for name in _CHOSEN_BY):
        _park_teams()


@cache
def _park_teams() -> None:
    """Start a team in each GNU OpenMP library of this process, once."""
    libraries = [ctypes.CDLL(path) for path in openmp_libraries()]
    if not libraries:
        return
    size = (os.cpu_count() or 1) + 1
    started = threading.Event()

    def park() -> None:
        for library in libraries:
            # Each thread of the team calls a function that only returns a number.
            library.GOMP_parallel(library.omp_get_num_threads, None, size, 0)
        started.set()
        # The team lives as long as the thread that created it.
        threading.Event().wait()

    # Not a `threading.Thread`: it belongs to no engine and ends with the process.
    _thread.start_new_thread(park, ())
    started.wait()
