"""The device that computes, its link, its CPU threads and its dtypes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache, partial

import torch

from triforce_core.machine_settings import MachineSettings
from triforce_core.plan.machine import Device
from triforce_kernels.dispatch import HOST, TRITON, KernelsError, backend
from triforce_kernels.weights.blocks import can_decode, has_kernel
from triforce_kernels.weights.linear import widens
from triforce_offload.errors import UsageError
from triforce_offload.kv.direct import reads_in_place
from triforce_offload.link.cuda import CudaLink
from triforce_offload.link.emulated import EmulatedLink
from triforce_offload.link.link import Link
from triforce_offload.machine.openmp import limit_busy_waiting
from triforce_offload.machine.probe import measured_gpu
from triforce_offload.machine.profiles import Hardware, known
from triforce_offload.memory.device import device_name
from triforce_offload.memory.host import CudaDriver, HostMemory
from triforce_offload.memory.numa import cpus_near
from triforce_offload.ranks import Ranks

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def rank_device(machine: MachineSettings, ranks: Ranks) -> tuple[torch.device, bool]:
    """Return the device of a rank, and whether no other rank uses it. Raises UsageError."""
    cuda = machine.device == "cuda" or (machine.device is None and torch.cuda.is_available())
    if ranks.count == 1 or not cuda:
        return open_device(machine.device), ranks.count == 1
    if ranks.here > (count := torch.cuda.device_count()):
        raise UsageError(
            f"{ranks.here} GPUs were asked for, and CUDA finds {count}; --device cuda:0 shares one"
        )
    return open_device(f"cuda:{ranks.local}"), True


def open_device(name: str | None) -> torch.device:
    """Return the named device; if `name` is None, the first GPU or else the CPU.

    Raises UsageError.
    """
    if name is None:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {name!r} is not known; use cuda:0 or cpu") from None
    if device.type == "cpu":
        _check_kernels(device)
        return torch.device("cpu")
    if device.type != "cuda":
        raise UsageError(f"device {name!r} is not supported; use cuda:0 or cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", device.index or 0)
    if device.index >= count:
        raise UsageError(f"device {name!r} is not there; CUDA finds {count} GPUs")
    _check_kernels(device)
    return device


def _check_kernels(device: torch.device) -> None:
    try:
        backend(device)
    except KernelsError as error:
        raise UsageError(str(error)) from error


def open_link(machine: MachineSettings, device: torch.device) -> tuple[Link, HostMemory]:
    """Return the link and the host memory that it copies from: PCIe on a GPU, an emulated link on
    the CPU. Host memory that is registered with the driver is copied directly.

    Raises UsageError.
    """
    if device.type == "cpu":
        return EmulatedLink(machine.link_bandwidth), HostMemory()
    if machine.link_bandwidth is not None:
        raise UsageError("--link-bandwidth sets the emulated link; on a GPU the link is real")
    host = HostMemory(CudaDriver(device), pin=machine.pin, cpus=cpus_near(device))
    return CudaLink(device, host), host


def describe(
    device: torch.device,
    machine: MachineSettings,
    dtype: torch.dtype,
    copy_bytes: int,
    *,
    own_device: bool,
) -> Device:
    """Return the properties of a device that a plan depends on.

    copy_bytes: size of one copy on its link
    """
    gpu, kernels = device.type == "cuda", backend(device) == TRITON
    host_kernels = backend(device) == HOST
    return Device(
        gpu=gpu,
        kernels=kernels,
        host_kernels=host_kernels,
        copy_bytes=copy_bytes,
        # Ranks that share a device exchange data through host memory, which cannot be recorded.
        graphs=machine.cuda_graphs and gpu and own_device,
        gathers_through_host=not (machine.pin and reads_in_place(device)),
        widens=widens(device, dtype),
        can_decode=partial(can_decode, device=device),
        has_kernel=partial(has_kernel, device=device),
    )


def rates(device: torch.device, dtype: torch.dtype, link: Link, ranks: Ranks) -> Hardware | None:
    """Return the rates of the GPU with the slowest link of all ranks: those of its name, or else
    measured ones, which takes some seconds once and is kept. Return None of a CPU, of a GPU that
    cannot be measured, or if this is not the first rank, which alone needs them. All GPUs should be
    of the same kind.

    Raises RankError.
    """
    if device.type != "cuda" or backend(device) != TRITON:
        return None
    slowest = float(ranks.least(int(link.bandwidth or 0))) or None
    if ranks.index:
        return None
    hardware = known(device_name(device), dtype.itemsize, slowest) or _measured(device, slowest)
    return hardware and replace(hardware, gpus=ranks.count)


def _measured(device: torch.device, link_bytes_per_second: float | None) -> Hardware | None:
    try:
        with torch.cuda.device(device):
            return measured_gpu(link_bytes_per_second)
    except RuntimeError as error:
        warnings.warn(
            f"cannot measure {device_name(device)}, so the plan is not the fastest: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    finally:
        torch.cuda.empty_cache()


def check_processor() -> None:
    """Raise UsageError if kernels were asked for that a processor cannot run."""
    try:
        backend(torch.device("cpu"))
    except KernelsError as error:
        raise UsageError(f"the CPU cannot compute parts of passes: {error}") from error


def set_threads(machine: MachineSettings, ranks: Ranks) -> None:
    """Set the number of threads that compute on the CPU, for the whole process."""
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    elif ranks.count > 1:
        # Divide the processors, so that threads of different ranks do not compete for them.
        torch.set_num_threads(max(1, _threads() // ranks.here))
    limit_busy_waiting()


@cache
def _threads() -> int:
    """Return PyTorch's number of threads before any engine changed it."""
    return torch.get_num_threads()
