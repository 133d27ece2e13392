"""The hardware of this machine: GPUs, their links, host memory and how much of it may be pinned."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from triforce_kernels.host.library import vectors
from triforce_offload.memory.available import available_host_bytes

# Of the extras `server` and `grammar`, one each.
_EXTRAS = ("fastapi", "llguidance")
_PACKAGES = ("torch", "transformers", "safetensors", "gguf", "triton", "numpy", *_EXTRAS)


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it, with current and maximal link generation and width."""

    name: str
    memory_bytes: int
    link_generation: int | None
    link_generation_most: int | None
    link_width: int | None
    link_width_most: int | None


@dataclass(frozen=True)
class Machine:
    """A machine's hardware and the versions that matter.

    pinning_limit_bytes: bytes that a process may lock (RLIMIT_MEMLOCK), None if unlimited
    vectors: vector units that the processor's compiled kernels use, None without such kernels
    """

    gpus: tuple[Gpu, ...]
    driver: str | None
    host_bytes: int
    host_available_bytes: int
    pinning_limit_bytes: int | None
    cores: int
    vectors: str | None
    python: str
    platform: str
    packages: dict[str, str | None]


def inspect_machine() -> Machine:
    """Inspect the machine through NVML and the operating system. Needs no GPU."""
    gpus, driver = _gpus()
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        gpus=gpus,
        driver=driver,
        host_bytes=psutil.virtual_memory().total,
        host_available_bytes=available_host_bytes(),
        pinning_limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
        cores=psutil.cpu_count() or 1,
        vectors=vectors(),
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in _PACKAGES},
    )


def provenance(command: str) -> dict[str, Any]:
    """Return where measured figures come from: date, command, hardware and versions."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
        "hardware": summary(),
        "versions": {name: _version(name) for name in ("torch", "transformers")},
    }


def summary() -> dict[str, Any]:
    """Return the hardware that figures depend on: processor, threads of torch, and GPU if any."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"processor": _processor(), "threads": torch.get_num_threads(), "gpu": gpu}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), None
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return tuple(map(_gpu, handles)), _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    import pynvml

    def ask(what: str) -> int | None:
        try:
            return getattr(pynvml, what)(handle)
        except pynvml.NVMLError:
            # Some cards and virtual machines do not report this.
            return None

    return Gpu(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        link_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        link_generation_most=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        link_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        link_width_most=ask("nvmlDeviceGetMaxPcieLinkWidth"),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
