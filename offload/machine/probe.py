"""Rates of this machine, measured in about two seconds and kept in the user's cache."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from triforce_offload.errors import OutputError, UsageError
from triforce_offload.files import Output, cache_directory
from triforce_offload.machine.gpus import measure_together
from triforce_offload.machine.processor import measure_processor
from triforce_offload.machine.profiles import ALL_REDUCE_SECONDS, EMULATED, Hardware, integer_rate
from triforce_offload.machine.timing import seconds_of
from triforce_offload.memory.available import available_host_bytes, lendable_bytes
from triforce_offload.units import parse_bandwidth

# Operations that the host runs for each kernel that `costs` counts: torch's profiler reports about
# 80, views included, for the 39 kernels of a layer's forward over one token.
OPERATIONS = 2
# Numbers of rows for which a matrix product is measured.
_ROWS = (1, 2, 8, 24, 64)
# Small operations are timed in this many rounds of ten: those of a norm and a rotation, with the
# views that they take.
_CHAIN, _KERNELS = 60, 10
_MATRIX_BYTES = 384 << 20
# Attention is measured over this many caches of this many keys, as in a pass over a few thousand
# tokens.
_CACHES, _CACHE_KEYS = 128, 512
_LAUNCHES = 200
# Size of the file with which the disk is measured.
_DISK_BYTES = 64 << 20
# Rows of the 4-bit matrix whose decoding is measured.
_DECODED = 512


@dataclass(frozen=True)
class Rates:
    """Measured rates of a machine.

    launch_seconds: time of one small operation, dispatch included
    link_bytes_per_second: rate of pinned copies to the device; None without a GPU
    product_seconds_per_byte, attend_bytes_per_second, attend_flops_per_second,
        decode_seconds_per_number: as in Hardware, for a CPU
    disk_bytes_per_second: as in Hardware
    processor_bytes_per_second, host_flops_per_second: as in Hardware
    other_links, host_bytes_per_second, all_reduce_seconds, all_reduce_bytes_per_second: as in
        Hardware, for several GPUs
    measured: date, as 2026-11-21
    load: average number of processes that used or waited for a processor, over one minute
    """

    memory_bytes_per_second: float
    flops_per_second: float
    launch_seconds: float
    link_bytes_per_second: float | None = None
    product_seconds_per_byte: tuple[tuple[int, float], ...] = ()
    attend_bytes_per_second: float | None = None
    attend_flops_per_second: float | None = None
    decode_seconds_per_number: float | None = None
    disk_bytes_per_second: float | None = None
    measured: str = ""
    load: float = 0.0
    other_links: tuple[float, ...] = ()
    host_bytes_per_second: float | None = None
    processor_bytes_per_second: float | None = None
    host_flops_per_second: float | None = None
    all_reduce_seconds: float | None = None
    all_reduce_bytes_per_second: float | None = None

    @property
    def source(self) -> str:
        """The origin of the rates, in words."""
        return f"measured on this machine on {self.measured}, at a load of {self.load:.1f}"


Matrices = Sequence[tuple[int, int]]


def this_machine(link_bandwidth: str | None, known: Sequence[str], matrices: Matrices) -> Hardware:
    """Return the first GPU of this machine, or the emulated device if there is none.

    link_bandwidth: bandwidth to use in place of the measured one; an emulated link needs it
    known: names of a few known cards, for the error without a GPU
    matrices: shapes of the model's matrices

    Raises UsageError.
    """
    import torch

    rate = None if link_bandwidth is None else parse_bandwidth(link_bandwidth)
    if torch.cuda.is_available():
        return measured_gpu(rate)
    if rate is None:
        raise UsageError(
            "this machine has no GPU: name one to plan for with --gpu, such as "
            f"{' or '.join(known)} (`triforce plan --help` names all), or give --link-bandwidth to "
            "plan for the emulated device"
        )
    key = (
        f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{matrices}, 4 bits"
    )
    return emulated(cached(key, lambda: measure_cpu(matrices)), rate)


def emulated(rates: Rates, link_bytes_per_second: float) -> Hardware:
    """Return the emulated device: its memory is the host's, its link a paced thread."""
    from triforce_kernels.host.library import library

    available = available_host_bytes()
    return Hardware(
        name=EMULATED,
        source=rates.source,
        memory_bytes=available // 2,
        memory_bytes_per_second=rates.memory_bytes_per_second,
        flops_per_second=rates.flops_per_second,
        link="emulated",
        link_bytes_per_second=link_bytes_per_second,
        launch_seconds=OPERATIONS * rates.launch_seconds,
        graph_launch_seconds=OPERATIONS * rates.launch_seconds,
        asynchronous=False,
        product_seconds_per_byte=rates.product_seconds_per_byte,
        attend_bytes_per_second=rates.attend_bytes_per_second,
        attend_flops_per_second=rates.attend_flops_per_second,
        decode_seconds_per_number=rates.decode_seconds_per_number or 0.0,
        multiplies_stored=library() is not None,
        disk_bytes_per_second=rates.disk_bytes_per_second,
        host_memory_bytes=available,
    )


def measure_cpu(matrices: Matrices = ((1024, 1024),)) -> Rates:
    """Measure what torch reaches on this CPU: products with few and with many rows, attention, and
    small operations. matrices: shapes of a layer's matrices, on which the read rate depends
    """
    import torch
    import torch.nn.functional as F

    from triforce_kernels.weights.integers import dequantise, quantise

    # Together larger than any processor cache, as a model's layers are.
    count = max(1, _MATRIX_BYTES // sum(rows * columns * 4 for rows, columns in matrices))
    layers = [torch.empty(shape).fill_(0.01) for _ in range(count) for shape in matrices]
    nbytes = sum(layer.numel() * 4 for layer in layers)
    query, queries = torch.randn(1, 3, 3, 64), torch.randn(1, 3, 192, 64)
    caches = torch.full((_CACHES, 2, 1, 3, _CACHE_KEYS, 64), 0.01).unbind()
    small = torch.randn(1, 576)

    def products(rows: int) -> Callable[[], None]:
        inputs = {columns: torch.randn(rows, columns) for _, columns in matrices}

        def run() -> None:
            for layer in layers:
                F.linear(inputs[layer.shape[1]], layer)

        return run

    def attention(query: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            for key, value in caches:
                F.scaled_dot_product_attention(query, key, value)

        return run

    def operations() -> None:
        x = small
        for _ in range(_CHAIN):
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(1.0))
            x = x * small + torch.cat((-x[..., 288:], x[..., :288]), -1) * small

    with torch.inference_mode():
        taken = {rows: seconds_of(products(rows)) / nbytes for rows in _ROWS}
        attended, wide = (seconds_of(attention(rows)) for rows in (query, queries))
        tiny = seconds_of(operations)
        packed = quantise(torch.randn(_DECODED, 1024))
        decoded = seconds_of(lambda: dequantise(packed)) / (_DECODED * 1024)
    rates = Rates(
        memory_bytes_per_second=1 / taken[_ROWS[0]],
        flops_per_second=2 * _ROWS[-1] / 4 / taken[_ROWS[-1]],
        launch_seconds=tiny / (_KERNELS * _CHAIN),
        product_seconds_per_byte=tuple(taken.items()),
        attend_bytes_per_second=sum(cache.numel() for cache in caches) * 4 / attended,
        attend_flops_per_second=4 * queries.numel() * _CACHE_KEYS * _CACHES / wide,
        decode_seconds_per_number=decoded,
        disk_bytes_per_second=measure_disk(),
    )
    return _now(rates)


def measure_gpu() -> Rates:
    """Measure the current GPU: copies in, copies within, a large product, kernel launches."""
    import torch

    size = 256 << 20
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    small = torch.zeros(8, device="cuda")

    def launches() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1)

    link = seconds_of(lambda: there.copy_(pinned, non_blocking=True), torch.cuda.synchronize)
    memory = seconds_of(lambda: other.copy_(there), torch.cuda.synchronize)
    product = seconds_of(lambda: matrix @ matrix, torch.cuda.synchronize)
    tiny = seconds_of(launches, torch.cuda.synchronize)
    rates = Rates(2 * size / memory, 2 * 4096**3 / product, tiny / _LAUNCHES, size / link)
    rates = replace(rates, disk_bytes_per_second=measure_disk())
    if torch.cuda.device_count() > 1:
        # A card whose memory others have filled cannot be measured.
        with suppress(RuntimeError):
            rates = replace(rates, **measure_together())
    if (processor := measure_processor()) is not None:
        rates = replace(
            rates,
            processor_bytes_per_second=processor.bytes_per_second,
            host_flops_per_second=processor.flops_per_second,
        )
    return _now(rates)


def measure_disk() -> float | None:
    """Measure the bytes per second read from a file in this package's cache directory, after the
    system has dropped the file from its page cache. Return None if that is not possible.
    """
    with suppress(OSError):
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(os.urandom(_DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            into = bytearray(_DISK_BYTES)
            file.seek(0)
            began = time.perf_counter()
            file.readinto(into)
            return _DISK_BYTES / (time.perf_counter() - began)
    return None


def cached(key: str, measure: Callable[[], Rates]) -> Rates:
    """Return the rates kept for `key`, or measure and keep them. A cache that cannot be read is
    ignored; the cache file is always written as a whole. `forget` empties it.
    """
    path = _cache_file()
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        known = json.loads(path.read_text("utf-8"))
        return _checked(known[key])
    rates = measure()
    if not isinstance(known, dict):
        known = {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = json.dumps(known | {key: asdict(rates)}, indent=2) + "\n"
        Output(path, "hardware").write(kept)
    except (OSError, OutputError) as error:
        warnings.warn(f"measured rates are not kept: {error}", RuntimeWarning, stacklevel=2)
    return rates


def forget() -> None:
    """Forget all rates, so that they are measured again when they are next needed."""
    with suppress(OSError):
        _cache_file().unlink()


def remeasured() -> Rates:
    """Measure the first GPU again; plans use these rates from now on. Without a GPU, measure this
    CPU with matrices of no particular model: a plan measures those of its own model again.
    """
    import torch

    forget()
    if not torch.cuda.is_available():
        return measure_cpu()
    return cached(_gpu_key(), measure_gpu)


def _gpu_key() -> str:
    import torch

    from triforce_offload.machine.hardware import inspect_machine

    name = torch.cuda.get_device_name()
    count = torch.cuda.device_count()
    cards = name if count == 1 else f"{count} x {name}"
    return f"{cards}, driver {inspect_machine().driver}, torch {torch.__version__}"


def _now(rates: Rates) -> Rates:
    """Return the rates marked with the current date and load."""
    return replace(rates, measured=date.today().isoformat(), load=round(os.getloadavg()[0], 2))


def _checked(raw: Any) -> Rates:
    """Return the rates of a cache entry. Raises ValueError or TypeError if they are invalid, or if
    another version measured them.
    """
    if not isinstance(raw, dict) or raw.keys() != {field.name for field in fields(Rates)}:
        raise ValueError("other rates are measured now")
    rates = Rates(**raw)
    pairs = tuple((rows, each) for rows, each in rates.product_seconds_per_byte)
    optional = (
        rates.link_bytes_per_second,
        rates.attend_bytes_per_second,
        rates.attend_flops_per_second,
        rates.decode_seconds_per_number,
        rates.disk_bytes_per_second,
        rates.host_bytes_per_second,
        rates.processor_bytes_per_second,
        rates.host_flops_per_second,
        rates.all_reduce_seconds,
        rates.all_reduce_bytes_per_second,
        *rates.other_links,
    )
    numbers = [rates.memory_bytes_per_second, rates.flops_per_second, rates.launch_seconds]
    numbers += [value for value in optional if value is not None]
    numbers += [number for pair in pairs for number in pair]
    if not all(isinstance(n, (int, float)) and 0 < n < float("inf") for n in numbers):
        raise ValueError("rates must be positive numbers")
    date.fromisoformat(rates.measured)
    if not isinstance(rates.load, (int, float)):
        raise ValueError("the load must be a number")
    return replace(rates, product_seconds_per_byte=pairs, other_links=tuple(rates.other_links))


def _cache_file() -> Path:
    return cache_directory() / "hardware.json"


def measured_gpu(link_bytes_per_second: float | None) -> Hardware:
    """Return the current GPU at measured rates, which are kept. It is measured if it was not yet.

    link_bytes_per_second: rate of its link in place of the measured one
    Raises RuntimeError if the GPU has no memory for the measurement.
    """
    import torch

    from triforce_offload.machine.hardware import inspect_machine

    machine = inspect_machine()
    card = machine.gpus[0] if machine.gpus else None
    name = torch.cuda.get_device_name()
    rates = cached(_gpu_key(), measure_gpu)
    free, _ = torch.cuda.mem_get_info()
    # A plan may stream as much as host memory has room for.
    memory = lendable_bytes(free, machine.host_available_bytes)
    link, full = "PCIe", True
    if card and card.link_generation_most and card.link_width:
        link = f"pcie{card.link_generation_most}x{card.link_width}"
        full = card.link_width == card.link_width_most
    return Hardware(
        name=name,
        source=rates.source,
        memory_bytes=memory,
        memory_bytes_per_second=rates.memory_bytes_per_second,
        flops_per_second=rates.flops_per_second,
        integer_ops_per_second=integer_rate(name),
        link=link,
        link_bytes_per_second=link_bytes_per_second or rates.link_bytes_per_second or 0.0,
        launch_seconds=rates.launch_seconds,
        disk_bytes_per_second=rates.disk_bytes_per_second,
        link_full=full,
        other_links=() if link_bytes_per_second else rates.other_links,
        host_bytes_per_second=rates.host_bytes_per_second,
        processor_bytes_per_second=rates.processor_bytes_per_second,
        host_flops_per_second=rates.host_flops_per_second,
        all_reduce_seconds=rates.all_reduce_seconds or ALL_REDUCE_SECONDS,
        all_reduce_bytes_per_second=rates.all_reduce_bytes_per_second,
        host_memory_bytes=machine.host_available_bytes,
    )


def _processor() -> str:
    from triforce_offload.machine.hardware import summary

    return summary()["processor"] or platform.processor() or "CPU"
