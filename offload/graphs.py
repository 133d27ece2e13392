"""CUDA graphs: a forward's kernels recorded once and launched again as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

# Computes from tensors at fixed addresses; gives its result in one.
Run = Callable[[], torch.Tensor]


class Recorder(Protocol):
    def record(self, run: Run) -> Run:
        """Records what `run` launches, without launching it. The result launches it again, on
        whatever its inputs hold then, and gives the same output tensor each time.

        Raises RuntimeError if it cannot be recorded.
        """


class CudaRecorder:
    """Records on one device. All graphs share one memory pool, since none runs beside another.

    The first graph recorded is a trivial one that stays: matrix libraries keep a workspace in the
    pool, and a pool that holds memory but no graph cannot be recorded into again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _recording_stream(device)
        self._anchor = torch.zeros(1, device=device)
        self._keep = self.record(lambda: self._anchor + 1)

    def record(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        # Should recording fail, the outer context still brings the caller's stream back. Other
        # threads may copy meanwhile: only this one's calls belong to the graph.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for a device: a matrix library keeps 8 to 32 MiB for each stream it ever saw.

    Nothing runs on this one, so recorders of several models do not meet there.
    """
    return torch.cuda.Stream(device)
