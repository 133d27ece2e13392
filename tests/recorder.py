"""A recorder for machines without CUDA graphs, as strict as they are.

A graph replays kernels on the addresses it was recorded with: what was a number then is that number
for ever, and nothing may ask the device for one. So does this: it keeps every operation with its
very tensors, runs them again in order, and refuses whatever makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
}


class ReplayRecorder:
    """recorded: how many forwards were; replayed: how often any was run again."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        operations: list = []

        class Keep(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                assert function not in _WAITS, f"{function} waits for the device"
                result = function(*args, **(kwargs or {}))
                operations.append((function, args, kwargs or {}, result))
                return result

        with Keep():
            output = run()
        self.recorded += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            for function, args, kwargs, result in operations:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return output

        return replay
