"""Collective operations between the devices of all ranks, with torch.distributed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from triforce_offload.link.waiting import come


def is_own(error: Exception) -> bool:
    """Return whether an error during a collective comes from this device itself.

    Such errors are out of memory, a fault of the device, and a call that a graph cannot record.
    """
    faults = (torch.OutOfMemoryError, torch.AcceleratorError)
    return isinstance(error, faults) or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


class Collectives:
    """The collectives of one rank.

    They use NCCL if each rank has a GPU of its own, else gloo; ranks that share a GPU go through
    host memory. What the processor computes goes through the GPUs where NCCL is used.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: int, device: torch.device, *, own_device: bool
    ) -> None:
        """Wait for all ranks and create the group.

        own_device: whether no other rank uses the device
        Raises RuntimeError.
        """
        self._rank, self._ranks = rank, ranks
        self._aborted = threading.Event()
        self._aborting = threading.Lock()
        self._device = device
        self._nccl = nccl = device.type == "cuda" and own_device
        if nccl:
            # `abort` ends a hung call; torch's own handling would end the process.
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
            # Make the library allocate its memory now, before free memory is measured.
            self.sum(torch.zeros(1, device=device))
        except BaseException:
            # The caller has no object to close, and an open group would prevent this process from
            # creating another one.
            self.abort()
            self.close()
            raise

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum `part` over all ranks, in place."""
        return self._on_host(part, dist.all_reduce)

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` on the other ranks with that of rank 0."""
        return self._on_host(tensor, lambda it: dist.broadcast(it, 0))

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """See Ranks.gather."""
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
        """Abort calls on this device that wait for a lost rank. Any thread may call this."""
        with self._aborting:
            if self._nccl and not self._aborted.is_set():
                self._aborted.set()
                dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        if not self._aborted.is_set():
            dist.destroy_process_group()

    def _on_host(self, tensor: torch.Tensor, run: Callable[[torch.Tensor], object]) -> torch.Tensor:
        if self._nccl and tensor.device.type == "cpu":
            there = tensor.to(self._device)
            run(there)
            return tensor.copy_(come(there).cpu())
        if not self._through_host:
            run(tensor)
            return tensor
        host = come(tensor).cpu()
        run(host)
        return tensor.copy_(host)
