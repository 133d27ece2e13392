"""CUDA graphs: a forward's kernels are recorded once and launched again as one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
# Computes from tensors at fixed addresses and returns its result in tensors at fixed addresses.
Run = Callable[[], T]


class Recorder(Protocol):
    def record(self, run: Run[T]) -> Run[T]:
        """Record the kernels that `run` launches, without launching them. Calling the result
        launches them on the current contents of the inputs, and returns the same result each time.

        Raises RuntimeError if `run` cannot be recorded.
        """


class CudaRecorder:
    """Records on one device. All graphs share one memory pool, since no two run at the same time.

    The first graph is a trivial one that is kept: matrix libraries keep a workspace in the pool,
    and a pool that has memory but no graph cannot be recorded into again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _recording_stream(device)
        self._anchor = torch.zeros(1, device=device)
        self._keep = self.record(lambda: self._anchor + 1)

    def record(self, run: Run[T]) -> Run[T]:
        graph = torch.cuda.CUDAGraph()
        # If recording fails, the outer context still restores the caller's stream. Other threads
        # may copy meanwhile: only this thread's calls belong to the graph.
        with (
            _no_garbage_collected(),
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            output = run()

        def replay() -> T:
            graph.replay()
            return output

        return replay


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Inside, no graph is released that is garbage: the driver does not permit it while a stream is
    recorded.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the recording stream of a device. There is one per device, because a matrix library
    keeps 8 to 32 MiB for each stream that it ever used.

    Nothing runs on this stream, so recorders of several models do not meet there.
    """
    return torch.cuda.Stream(device)
