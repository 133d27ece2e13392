"""CUDA graphs: what a stream is given under capture is kept, and run by each replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from simulated_gpu.machine import machine, span_of
from simulated_gpu.memory import Allocation
from simulated_gpu.operators import returned, tensors_in, use_all
from simulated_gpu.order import LOCK, Stream, UsedStream

_POISON = 255


class Graph:
    """torch.cuda.CUDAGraph. Nothing runs while it is recorded.

    Invariants, and why they are a GPU's:
    - Results recorded hold NaN until the first replay, since nothing computed them.
    - A replay reads the same addresses: memory of others that was given back since is an error.
    - What no tensor refers to any more after the capture is NaN after each replay: the graphs of
      one pool share such memory.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.invalid: str | None = None
        self._runs: list[Callable[[], None]] = []
        self._made: list[tuple[torch.Tensor, weakref.ref[Allocation] | None]] = []
        self._read: dict[int, weakref.ref[Allocation]] = {}

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        here = machine()
        if here.capturing is not None:
            raise RuntimeError("a capture was begun inside another")
        if here.current_stream().is_default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        here.thread.capturing = self
        self._index = here.thread.device

    def capture_end(self) -> None:
        here = machine()
        here.thread.capturing = None
        if self.invalid is not None:
            raise RuntimeError(
                f"CUDA error: operation failed due to a previous error during capture "
                f"({self.invalid})"
            )
        device = here.devices[self._index]
        for place, (tensor, _) in enumerate(self._made):
            found = device.find(tensor)
            self._made[place] = (tensor, None if found is None else weakref.ref(found))

    def replay(self) -> None:
        with LOCK:
            here = machine()
            here.refuse_capture("cudaGraphLaunch")
            for allocation in self._read.values():
                if allocation() is None:
                    raise RuntimeError(
                        "CUDA error: an illegal memory access: a graph reads memory that was given "
                        "back since it was recorded"
                    )
            for run in self._runs:
                run()
            for tensor, allocation in self._made:
                if allocation is None or allocation() is None:
                    _poison(tensor)

    def reset(self) -> None:
        self._runs.clear()
        self._made.clear()

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def add(self, run: Callable[[], Any]) -> None:
        """Records something that runs in each replay."""
        self._runs.append(run)

    def record(
        self, func: Any, args: tuple, kwargs: dict, written: tuple[int | str, ...], index: int
    ) -> Any:
        """Records an operation, and gives results of its shapes."""
        self.reads((args, tuple(kwargs.values())), index)

        def used() -> None:
            use_all(machine(), index, f"{func} of a graph", args, kwargs, written)

        if written:

            def run() -> None:
                func(*args, **kwargs)
                used()

            self.add(run)
            return returned(func, args, kwargs)
        results = _shaped(func, args, kwargs)

        def run_into() -> None:
            used()
            given = func(*args, **kwargs)
            for into, value in zip(tensors_in(results), tensors_in(given), strict=True):
                into.copy_(value)

        for tensor in tensors_in(results):
            _poison(tensor)
            self._made.append((tensor, None))
        self.add(run_into)
        return results

    def reads(self, values: Any, index: int) -> None:
        """Notes memory of others, which must be there still when this is replayed."""
        device = machine().devices[index]
        for tensor in tensors_in(values):
            found = device.find(tensor)
            if found is not None and found.graph is None:
                self._read[id(found)] = weakref.ref(found)


class Capture:
    """torch.cuda.graph."""

    def __init__(
        self,
        cuda_graph: Graph,
        pool: object = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = cuda_graph
        self._pool = pool
        self._mode = capture_error_mode
        self._stream = UsedStream(stream or Stream())

    def __enter__(self) -> None:
        machine().synchronize()
        self._stream.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *exc: object) -> None:
        self._graph.capture_end()
        self._stream.__exit__(*exc)


def _shaped(func: Any, args: tuple, kwargs: dict) -> Any:
    """Results of an operation's shapes and strides: of zeros, since indices must be valid."""
    return _like(func(*_zeros(args), **_zeros(kwargs)))


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        start, end = span_of(value)
        flat = torch.zeros((end - start) // value.element_size(), dtype=value.dtype)
        return flat.as_strided(value.shape, value.stride())
    if isinstance(value, (tuple, list)):
        return type(value)(_zeros(each) for each in value)
    if isinstance(value, dict):
        return {name: _zeros(each) for name, each in value.items()}
    return value


def _like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value)(_like(each) for each in value)
    return value


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(_POISON) if tensor.is_contiguous() and tensor.dim() else None
