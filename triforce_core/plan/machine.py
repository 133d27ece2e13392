"""The properties of a machine that a plan depends on: its device and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from triforce_kernels.limits import HOST_PARTS, MOST_SPLITS
from triforce_kernels.weights.block_types import BlockType
from triforce_offload.errors import DoesNotFitError
from triforce_offload.kv.sizes import COPY_BYTES
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placing import place_on_host


@dataclass(frozen=True)
class Device:
    """The properties of a device that affect how much memory a model takes.

    gpu: whether it is a GPU rather than the emulated device
    kernels: whether its kernels are Triton's
    host_kernels: whether it is a processor with compiled kernels (`kernels/host`)
    copy_bytes: size of a KV block with which copies get close to the link's peak rate
    graphs: whether forwards that wait for nothing may be recorded
    gathers_through_host: whether the host gathers retrieved chunks (`kv/gather`)
    widens: whether products in half precision are computed in float32 (`kernels/weights/linear`)
    can_decode: whether weights in blocks of a type are supported at all
    has_kernel: whether a kernel decodes blocks of a type, without tables from the host
    """

    gpu: bool = False
    kernels: bool = False
    host_kernels: bool = False
    copy_bytes: int = COPY_BYTES
    graphs: bool = False
    gathers_through_host: bool = True
    widens: bool = False
    can_decode: Callable[[BlockType], bool] = lambda kind: True
    has_kernel: Callable[[BlockType], bool] = lambda kind: True

    def splits(self, kv_heads: int) -> int:
        """Return the most parts into which the attention of a pass divides the keys of a head."""
        if self.host_kernels:
            return max(1, HOST_PARTS // kv_heads)
        return MOST_SPLITS if self.kernels else 1


@dataclass(frozen=True)
class Room:
    """Memory that a plan may take on each of `gpus` equal devices, in bytes.

    device_bytes: memory of the device
    host_bytes: free host memory, of which the emulated device also takes a part; None if unknown
    host_limit: limit of host memory for streamed weights and KV; None for no limit
    emulated: whether the device is the emulated one
    reads_files: whether passes may read layers from their files
    """

    device_bytes: int
    host_bytes: int | None = None
    host_limit: int | None = None
    emulated: bool = False
    reads_files: bool = False
    gpus: int = 1

    def agreed(self, least: Callable[[int], int]) -> Room:
        """Return the memory that every rank has. Raises RankError.

        least: returns the least number of all ranks, given this rank's
        """

        def of_all(nbytes: int | None) -> int | None:
            return None if nbytes is None else least(nbytes)

        device, host, limit = map(of_all, (self.device_bytes, self.host_bytes, self.host_limit))
        return replace(self, device_bytes=device, host_bytes=host, host_limit=limit)

    def with_files(self, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan with layers left in their files if the host has no room for them.

        Raises DoesNotFitError, with the figures of all devices together, or UsageError.
        """
        plan.check(self.device_bytes)
        if (limit := self.host_bytes) is None:
            return plan
        if self.emulated:
            if plan.device_bytes > limit:
                self._refuse(
                    "host memory for the emulated device",
                    plan.device_bytes,
                    limit,
                    "use a shorter context, a smaller model or less device memory",
                )
            limit -= plan.device_bytes
        if self.host_limit is not None:
            limit = min(limit, self.host_limit)
        if self.reads_files:
            plan = place_on_host(plan, limit)
        if plan.host_bytes > limit:
            self._refuse(
                f"host memory for {plan.requirements.context_tokens} tokens of context",
                plan.host_bytes,
                limit,
                "give more host memory, or more device memory",
            )
        return plan

    def _refuse(self, what: str, needed: int, available: int, remedy: str) -> None:
        raise DoesNotFitError(what, needed * self.gpus, available * self.gpus, remedy)
