"""What ranks compute together, from device to device, by torch.distributed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from triforce_offload.link.waiting import come


def is_own(error: Exception) -> bool:
    """Whether an error of a call to other ranks is this device's own: its memory, a fault of it, or
    a call that cannot be recorded as part of a graph.
    """
    faults = (torch.OutOfMemoryError, torch.AcceleratorError)
    return isinstance(error, faults) or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


class Collectives:
    """NCCL where each rank has a GPU of its own; gloo on CPUs, and through host memory where ranks
    share a GPU.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: int, device: torch.device, *, own_device: bool
    ) -> None:
        """Waits for all ranks. own_device: whether no other rank computes on it.

        Raises RuntimeError.
        """
        self._rank, self._ranks = rank, ranks
        self._aborted = threading.Event()
        self._aborting = threading.Lock()
        self._nccl = nccl = device.type == "cuda" and own_device
        if nccl:
            # What ends a hung call is `abort`, and not torch, which would end the process.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._through_host = device.type == "cuda" and not nccl
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            device_id=device if nccl else None,
        )
        try:
            # The library takes its memory now, before anybody counts what is free.
            self.sum(torch.zeros(1, device=device))
        except BaseException:
            # Nobody else can: without the group given back this process could make no other.
            self.abort()
            self.close()
            raise

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Of all ranks' parts, written over `part`."""
        return self._on_host(part, dist.all_reduce)

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Writes the first rank's tensor over the others'."""
        return self._on_host(tensor, lambda it: dist.broadcast(it, 0))

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Ranks.gather."""
        rows, most = part.shape[0], max(widths)
        device = part.device
        if self._through_host:
            part = come(part).cpu()
        if part.shape[1] < most:
            part = torch.nn.functional.pad(part, (0, most - part.shape[1]))
        if self._rank:
            dist.gather(part.contiguous(), None, 0)
            return part.new_empty((rows, 0), device=device)
        parts = [torch.empty_like(part) for _ in range(self._ranks)]
        dist.gather(part.contiguous(), parts, 0)
        whole = torch.cat([it[:, :width] for it, width in zip(parts, widths, strict=True)], 1)
        return whole.to(device)

    def abort(self) -> None:
        """Ends what waits on this device for a rank that is gone. Called in any thread."""
        with self._aborting:
            if self._nccl and not self._aborted.is_set():
                self._aborted.set()
                dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        if not self._aborted.is_set():
            dist.destroy_process_group()

    def _on_host(self, tensor: torch.Tensor, run: Callable[[torch.Tensor], object]) -> torch.Tensor:
        if not self._through_host:
            run(tensor)
            return tensor
        host = come(tensor).cpu()
        run(host)
        return tensor.copy_(host)
