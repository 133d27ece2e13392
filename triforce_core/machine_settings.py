"""Settings of the machine that an engine runs on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from triforce_offload.errors import UsageError
from triforce_offload.units import parse_bandwidth, parse_bytes

# Upper limit of threads per processor.
MOST_THREADS_EACH = 4
MOST_GPUS = 64


@dataclass(frozen=True)
class MachineSettings:
    """The device, its memory and its link. Raises UsageError for values that cannot be used.

    device: "cuda:0" or "cpu"; None for the first GPU, or the CPU if there is no GPU
    device_memory: memory budget of the device, in bytes or as "22GiB"; None for all free memory
    host_memory: limit of the host memory for streamed weights and KV, in bytes or as "48GiB"; each
        pass reads layers beyond the limit from their files; None for all free memory
    link_bandwidth: bandwidth of the emulated link (CPU only), in bytes per second or as "25GB/s";
        None for the speed of memory
    pin: whether streamed host memory is registered with the CUDA driver, for direct copies
    cuda_graphs: whether forwards that wait for nothing are recorded as CUDA graphs
    threads: number of CPU threads that compute, for the whole process; None for PyTorch's default,
        which ranks on one machine divide among them
    gpus: number of GPUs that share the model, one rank for each. Each rank has `device_memory`, a
        part of `host_memory` and its own link. Several ranks are started on this machine, or by
        torchrun; `device` is then "cuda", "cuda:0" if the ranks share a GPU, or "cpu"
    """

    device: str | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    link_bandwidth: float | None = None
    pin: bool = True
    cuda_graphs: bool = True
    threads: int | None = None
    gpus: int = 1

    def __post_init__(self) -> None:
        if self.device is not None:
            object.__setattr__(self, "device", str(self.device))
        for name in ("device_memory", "host_memory"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name)))
        if self.link_bandwidth is not None:
            object.__setattr__(self, "link_bandwidth", parse_bandwidth(self.link_bandwidth))
        if not is_whole(self.gpus, 1, MOST_GPUS):
            raise UsageError(f"gpus must be 1 to {MOST_GPUS}, got {self.gpus!r}")
        most = MOST_THREADS_EACH * (os.cpu_count() or 1)
        if self.threads is not None and not is_whole(self.threads, 1, most):
            raise UsageError(f"threads must be 1 to {most} on this machine, got {self.threads!r}")


def is_whole(value: object, least: int, most: int | None = None) -> bool:
    """Return whether a value is a whole number within limits."""
    return type(value) is int and value >= least and (most is None or value <= most)
