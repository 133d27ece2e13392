"""CUDA graphs: a forward's kernels recorded once and launched again as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], torch.Tensor]
"""Computes from tensors at fixed addresses; gives its result in one."""


class Recorder(Protocol):
    def record(self, run: Run) -> Run:
        """Records what `run` launches, without launching it. The result launches it again, on
        whatever its inputs hold then, and gives the same output tensor each time.
        """


class CudaRecorder:
    """Records on one device; all graphs share one memory pool, since none runs beside another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy meanwhile: only this one's calls belong to the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
